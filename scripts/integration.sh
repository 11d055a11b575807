#!/bin/sh
# Runs the tests that need a kernel in an emulated machine whose kernel has
# cgroup v2 only, and prints which budget item was proven there and how.
#
# Usage: integration.sh [setup | PACKAGE...]
#   setup     install what is missing and make the guest, no more
#   PACKAGE   run these only, whole: cgroup, jail, cmd/jail, ...
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

# Installs what is missing on the host, by Debian package name.
setup_host() {
	missing=""
	command -v qemu-system-x86_64 >/dev/null || missing="$missing qemu-system-x86"
	command -v mmdebstrap >/dev/null || missing="$missing mmdebstrap"
	command -v mke2fs >/dev/null || missing="$missing e2fsprogs"
	[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing="$missing debian-archive-keyring"
	[ -n "$missing" ] || return 0
	if [ "$(id -u)" != 0 ]; then
		echo "integration.sh: missing packages:$missing; run as root or install them" >&2
		exit 1
	fi
	say "installing$missing"
	apt-get update -qq
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# What the tests run in the guest, and a kernel that is not installed there.
guest_packages=python3,nodejs,sqlite3,busybox-static,gcc,libc6-dev,procps,ca-certificates,libseccomp2
kernel_package=linux-image-cloud-amd64
kernel_modules="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk"

# Makes the guest: vmlinuz, modules/, root.img. A change of what it is made of
# makes it again.
setup_guest() {
	recipe="1 $suite ${JAIL_VM_MIRROR:-} $guest_packages $kernel_package $kernel_modules"
	[ "$(cat "$dir/recipe" 2>/dev/null)" != "$recipe" ] || return 0
	if [ "$(id -u)" != 0 ]; then
		echo "integration.sh: making the guest's image needs root" >&2
		exit 1
	fi
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
		exit 1
	}
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

# Runs one package's tests. What is not given is run whole.
# one PACKAGE CGROUP [TEST FLAG...]
one() {
	package=$1 cgroup=$2
	shift 2
	name=$(echo "$package" | tr / _)
	log=$dir/logs/$name.log
	where=
	if [ "$cgroup" = / ]; then
		where=" (root cgroup)" log=$dir/logs/$name-root.log
	fi
	binary=$dir/$name.test
	if [ ! -e "$binary" ] || [ -z "${built##* $name *}" ]; then :; fi
	case $built in
	*" $name "*) ;;
	*)
		go test -c -tags "$tags" -cover -covermode atomic -coverpkg ./... -o "$binary" "./$package"
		built="$built$name "
		;;
	esac
	start=$(date +%s)
	result=ok
	"$dir/vm" run -cache "$dir" -timeout 6m -results "$dir/results" -cgroup "$cgroup" \
		-dir "/src/$package" -add "$package:/src/$package" -add examples:/src/examples \
		-- "$binary" -test.v -test.timeout 5m -test.gocoverdir /result "$@" >"$log" 2>&1 || {
		result=FAIL
		code=1
	}
	printf '%-5s%-26s%4d passed %3d failed %3d skipped %5d s\n' "$result" "$package$where" \
		"$(grep -cE '^ *--- PASS' "$log")" "$(grep -cE '^ *--- FAIL' "$log")" "$(grep -cE '^ *--- SKIP' "$log")" $(($(date +%s) - start))
	grep -E '^ *--- SKIP' -A1 "$log" || true
	if [ $result != ok ]; then
		# What was printed between a failing test's start and its verdict.
		awk '/^=== RUN/ {buf=""} {buf=buf $0 "\n"} /^ *--- FAIL/ {printf "%s", buf; buf=""} /^--- PASS/ {buf=""}' "$log" | tail -n 200
		grep -nE '^(panic|fatal error|left behind|helper .* not used|vm: )' "$log" | head -20 || true
		tail -n 15 "$log"
	fi
}

# Loops of hundreds of starts, which other tests make once. Under emulation
# each of them takes tens of seconds.
slow() {
	[ "${JAIL_VM_SLOW:-}" = 1 ] || echo "-test.skip=$1"
}

setup_host
setup_guest
[ "${1:-}" != setup ] || exit 0

[ -e jail/jailinit/jail-init ] && [ -e seccomp/program_ahead.go ] || make --no-print-directory build
CGO_ENABLED=0 go build -o "$dir/vm" ./integration/vm
rm -rf "$dir/logs" "$dir/results"
mkdir -p "$dir/logs" "$dir/results"
service=/system.slice/jail-test.service
code=0
built=" "
say "running the tests in a machine with cgroup v2; logs are in $dir/logs"
if [ $# -gt 0 ]; then
	for package in "$@"; do
		one "${package#./}" $service
	done
else
	one cgroup $service
	one jail $service
	one rootfs $service
	one cmd/jail $service
	one seccomp $service
	one wire $service
	one cgroup /
	one jail /
fi

echo
echo "budget items proven on $(cat "$dir/logs/kernel" 2>/dev/null || echo the guest) by ending or refusing a real program:"
cat "$dir"/logs/*.log | grep -oE 'proven: .*' | sed 's/^proven: //' | sort -u | awk -F'|' '{printf "  %-11s %-52s %s\n", $1, $2, $3}'
