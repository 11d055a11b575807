#!/bin/sh
# Runs the tests that need a kernel in an emulated machine whose kernel has
# cgroup v2 only, and prints which budget item was proven there and how.
#
# Usage: integration.sh [setup | quick | PACKAGE...]
#   setup     install what is missing and make the guest, no more
#   quick     leave out what does not depend on the version of cgroups, and the
#             table: scripts/test.sh prints it
#   PACKAGE   run these only, whole: cgroup, jail, cmd/jail, ...
#
# Exit code: 0 all passed, 1 a test failed or an item is not proven, 2 the machine
# could not be had.
#
# Environment: JAIL_VM_DIR    where the guest, logs and coverage are (build/vm)
#              JAIL_VM_SUITE  the guest's Debian release (the host's)
#              JAIL_VM_MIRROR where its packages come from (Debian's)
#              JAIL_VM_SLOW   1 runs the long tests as well
set -eu
cd "$(dirname "$0")/.."

dir=${JAIL_VM_DIR:-build/vm}
tags=runc_nocriu
. /etc/os-release
[ "${ID:-}" = debian ] || VERSION_CODENAME=bookworm
suite=${JAIL_VM_SUITE:-$VERSION_CODENAME}

say() { echo "integration: $*"; }
fail() {
	echo "integration.sh: $*" >&2
	exit 2
}

# Installs what is missing on the host, by Debian package name.
setup_host() {
	missing=""
	command -v qemu-system-x86_64 >/dev/null || missing="$missing qemu-system-x86"
	command -v mmdebstrap >/dev/null || missing="$missing mmdebstrap"
	command -v mke2fs >/dev/null || missing="$missing e2fsprogs"
	[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing="$missing debian-archive-keyring"
	[ -n "$missing" ] || return 0
	[ "$(id -u)" = 0 ] || fail "missing packages:$missing; run as root or install them"
	say "installing$missing"
	apt-get update -qq || fail "the lists of packages cannot be had; missing:$missing"
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null || fail "cannot install$missing"
}

# What the tests run in the guest, and a kernel that is not installed there.
guest_packages=python3,nodejs,sqlite3,busybox-static,gcc,libc6-dev,procps,ca-certificates,libseccomp2
kernel_package=linux-image-cloud-amd64
kernel_modules="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk"

# Makes the guest: vmlinuz, modules/, root.img. A change of what it is made of
# makes it again.
setup_guest() {
	recipe="2 $suite ${JAIL_VM_MIRROR:-} $guest_packages $kernel_package $kernel_modules"
	[ "$(cat "$dir/recipe" 2>/dev/null)" != "$recipe" ] || return 0
	[ "$(id -u)" = 0 ] || fail "making the guest's image needs root"
	say "making the guest in $dir: Debian $suite with $guest_packages and the kernel of $kernel_package (once, a minute or two)"
	# No Go package may seem to be in there: the name begins with a dot.
	work=$dir/.making
	rm -rf "$work" "$dir/recipe" "$dir/modules"
	mkdir -p "$work/kernel" "$dir/modules"
	work=$(realpath "$work")
	export work kernel_package
	# shellcheck disable=SC2016,SC2086
	mmdebstrap --quiet --variant=minbase --include="$guest_packages" \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
		--customize-hook='printf "127.0.0.1 localhost vm\n::1 localhost\n" >"$1/etc/hosts"' \
		--customize-hook='export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"; cd "$work/kernel" &&
			image=$(apt-cache depends "$kernel_package" | sed -n "s/^ *Depends: \(linux-image-\)/\1/p") && apt-get -q download "$image" && dpkg-deb -x linux-image-*.deb .' \
		"$suite" "$work/root" ${JAIL_VM_MIRROR:-} >"$dir/making.log" 2>&1 || {
		tail -n 30 "$dir/making.log" >&2
		fail "the guest cannot be made"
	}
	basename "$work"/kernel/boot/vmlinuz-* | sed 's/^vmlinuz-/Linux /' >"$dir/kernel"
	mv "$work"/kernel/boot/vmlinuz-* "$dir/vmlinuz"
	for m in $kernel_modules; do
		find "$work/kernel" -name "$m.ko*" -exec mv {} "$dir/modules" \;
	done
	rm -f "$dir/root.img"
	mke2fs -q -t ext4 -d "$work/root" "$dir/root.img" 2G >/dev/null
	rm -rf "$work"
	echo "$recipe" >"$dir/recipe"
	say "made it: $(du -sh "$dir" | cut -f1) on disk"
}

# one PACKAGE CGROUP [FLAG...] runs one package's tests; the flags are the test
# binary's.
one() {
	package=$1 cgroup=$2
	shift 2
	name=$(echo "$package" | tr / _)
	log=$dir/logs/$name.log where=""
	[ "$cgroup" != / ] || log=$dir/logs/$name-root.log where=" (root cgroup)"
	binary=$dir/$name.test
	case $built in
	*" $name "*) ;;
	*)
		if ! go test -c -tags "$tags" -cover -covermode atomic -coverpkg ./... -o "$binary" "./$package"; then
			echo "FAIL  $package$where does not build"
			code=1
			return 0
		fi
		built="$built$name "
		;;
	esac
	begin=$(date +%s) result=ok
	# What the commands under test reach counts as well: GOCOVERDIR.
	# The temporary directory is on the disk, as on a Debian 12 host: its /tmp
	# would be a tmpfs here, which has no idmapped mounts before Linux 6.3.
	"$dir/vm" run -cache "$dir" -timeout 6m -results "$dir/results" -cgroup "$cgroup" \
		-clean -env GOCOVERDIR=/result -env TMPDIR=/var/tmp -env JAIL_TEST_MACHINE=1 -env JAIL_COMMAND=/opt/vm/jail \
		-dir "/src/$package" -add "$dir/.src:/src" -add "$dir/jail:/opt/vm/jail" \
		-- "$binary" -test.v -test.timeout 5m -test.gocoverdir /result "$@" >"$log" 2>&1 || {
		result=FAIL code=1
	}
	printf '%-4s  %-22s %4d passed %3d failed %3d skipped %4d s   %s\n' $result "$package$where" \
		"$(count PASS)" "$(count FAIL)" "$(count SKIP)" $(($(date +%s) - begin)) "$*"
	grep -E '^ *--- SKIP' -A1 "$log" || true
	if [ $result != ok ]; then
		grep -E '^ *--- FAIL' "$log" || true
		# What was printed between a failing test's start and its verdict.
		awk '/^=== RUN/ {buf=""} {buf=buf $0 "\n"} /^ *--- FAIL/ {printf "%s", buf; buf=""} /^--- PASS/ {buf=""}' "$log" | tail -n 80 | cut -c 1-400
		grep -nE -A3 '^(panic|fatal error|left behind|helper .* not used|vm:)' "$log" | cut -c 1-400 | head -40 || true
		echo "the end of $log:"
		tail -n 10 "$log" | cut -c 1-400
	fi
}

# without SLOW [SAME] is the flag that leaves tests out. SLOW: loops of hundreds of
# starts, and computations that no kernel has a part in; each takes up to a
# minute here. SAME, in a quick run: what has nothing to do with cgroups, and
# passes on the host.
without() {
	pattern=$1
	[ "${JAIL_VM_SLOW:-}" != 1 ] || pattern=""
	[ -z "$quick" ] || pattern=$pattern${2:+${pattern:+|}$2}
	if [ -n "$pattern" ]; then echo "-test.skip=$pattern"; else echo -test.count=1; fi
}

count() { grep -cE "^ *--- $1" "$log" || true; }

setup_host
setup_guest
quick=""
case "${1:-}" in
setup) exit 0 ;;
quick)
	quick=yes
	shift
	;;
esac

begun=$(date +%s)
rm -rf "$dir/logs" "$dir/results" "$dir/.src" "$dir/coverage.txt" "$dir/all.log"
mkdir -p "$dir/logs" "$dir/results" "$dir/.src"
if ! [ -e jail/jailinit/jail-init ] || ! [ -e seccomp/program_ahead.go ]; then
	make --no-print-directory build
fi
CGO_ENABLED=0 go build -o "$dir/vm" ./integration/vm
go build -tags "$tags" -cover -covermode atomic -coverpkg ./... -o "$dir/jail" ./cmd/jail
tar -cf - --exclude=./.git --exclude=./bin --exclude=./build --exclude="./$dir" . | tar -xf - -C "$dir/.src"
service=/system.slice/jail-test.service
code=0 built=" "
say "testing on $(cat "$dir/kernel") with cgroup v2; logs are in $dir/logs"
if [ $# -gt 0 ]; then
	for package in "$@"; do
		one "${package#./}" $service
	done
else
	one cgroup $service "$(without '')"
	one jail $service "$(without TestManyJailsLeaveNothing 'TestCompile|TestScriptValues|TestBrokenFramesEndTheJail|TestUnreadAnswers|TestPoolOfGuests|TestOutputIsTheSameForEveryDestination')"
	one rootfs $service "$(without TestPinsAreBounded TestSpoiledPinsAreRebuilt)"
	# The README's first transcript has a wall clock of 10 s, too few here.
	one cmd/jail $service "$(without TestReadmeTranscripts 'TestLauncherMemoryIsBoundedUnderAFlood|TestScripts/(script_.*|run_image|run_bad_flags)')"
	one seccomp $service "$(without 'TestRandomProfilesMeanWhatTheySay|TestCompileRefuses' TestDefaultGolden)"
	[ -n "$quick" ] ||
		one wire $service "$(without 'TestHostileCallers|TestEncodersRefuse|TestValueTooLarge|TestInflightBytes|TestLargeFrames|TestResponseSize')"
	# A launcher whose cgroup is the root has no need to step aside.
	one cgroup / "$(without 'TestKillEndsEverything|TestLaunchersAndCollectorsRace|TestNothingIsLeftOfALeaf' TestIOIsThrottled)"
	one jail / -test.run='TestCauseOfACommand|TestForkBomb|TestCPUsThrottle|TestKilledLauncherLeavesNothing|TestLauncherKilledAtAnyTime'
fi
rm -rf "$dir/.src"
cat "$dir"/logs/*.log >"$dir/all.log"

if [ $# = 0 ] && [ -z "$quick" ]; then
	echo
	./scripts/proven.py "$dir/all.log" || code=1
fi
if [ -n "$(ls "$dir/results")" ]; then
	go tool covdata textfmt -i="$dir/results" -o="$dir/coverage.txt"
	echo
	echo "statements reached, in $dir/coverage.txt:"
	go tool covdata percent -i="$dir/results" | awk '$3 != "0.0%" && / of statements/ {print "  " $1, $3}'
fi
say "$(($(date +%s) - begun)) s"
exit $code
