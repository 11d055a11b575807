#!/bin/sh
# Brings up the machine of the Vagrantfile, runs the tests in it as root, each
# package in a service of its own, brings output and exit code back, and
# destroys the machine, also on failure, Ctrl-C and SIGTERM.
#
# Usage: vagrant.sh [setup | validate | PACKAGE...]
#   setup     install what is missing, no more
#   validate  check the Vagrantfile, no more
#   PACKAGE   run these only, whole: cgroup, jail, cmd/jail, ...
#
# Environment: VAGRANT_DEFAULT_PROVIDER  libvirt (default) or virtualbox
#              JAIL_BOX        the box (jail/bookworm if vagrant-box.sh has made
#                              it, else debian/bookworm64)
#              JAIL_VM_DRIVER  libvirt's driver (kvm; qemu where there is no KVM)
#              JAIL_VM_SLOW    1 runs the long tests as well
#
# Exit code: 0 all passed, 1 a test failed or something was left behind, 2 the
# machine could not be had, 130 ended by a signal.
set -eu
cd "$(dirname "$0")/.."

# Test binaries, logs and state.
dir=$PWD/build/vagrant
mkdir -p "$dir"
# Static: the guest's C library may be older than the host's.
tags=runc_nocriu,netgo,osusergo
export VAGRANT_DEFAULT_PROVIDER="${VAGRANT_DEFAULT_PROVIDER:-libvirt}"
# Not .vagrant: a machine that somebody has brought up by hand is not ours.
export VAGRANT_DOTFILE_PATH="$dir/machine"
export VAGRANT_CHECKPOINT_DISABLE=1
# What a libvirtd of our own needs; also the mark that there is one.
own=/run/jail-vagrant
begin=$(date +%s)

say() { printf 'vagrant: %4d s: %s\n' $(($(date +%s) - begin)) "$*"; }
fail() {
	echo "vagrant.sh: $*" >&2
	exit 2
}

# Installs what is missing, by Debian package name.
missing=""
need() { # need PACKAGE TEST...
	package=$1
	shift
	"$@" >/dev/null 2>&1 || missing="$missing $package"
}
setup() {
	need vagrant command -v vagrant
	need rsync command -v rsync
	need openssh-client command -v ssh
	if [ "$VAGRANT_DEFAULT_PROVIDER" = libvirt ]; then
		need vagrant-libvirt sh -c "vagrant plugin list | grep -q '^vagrant-libvirt '"
		need libvirt-daemon-system test -e /etc/libvirt/qemu.conf
		need libvirt-daemon-driver-qemu sh -c 'ls /usr/lib/*/libvirt/connection-driver/libvirt_driver_qemu.so || ls /usr/lib*/libvirt/connection-driver/libvirt_driver_qemu.so'
		need libvirt-clients command -v virsh
		need qemu-system-x86 command -v qemu-system-x86_64
		need qemu-utils command -v qemu-img
		need dnsmasq-base test -x /usr/sbin/dnsmasq
		need iptables test -x /usr/sbin/iptables
		need dmidecode test -x /usr/sbin/dmidecode
	fi
	[ -n "$missing" ] || return 0
	[ "$(id -u)" = 0 ] || fail "missing packages:$missing; run as root or install them"
	say "installing$missing"
	apt-get update -qq
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# validate asks for the provider only where there is one: without it the
# provider's own settings cannot be checked.
validate() {
	export VAGRANT_DOTFILE_PATH="$dir/.validate"
	trap 'rm -rf "$VAGRANT_DOTFILE_PATH"' EXIT
	if [ "$VAGRANT_DEFAULT_PROVIDER" != libvirt ] || vagrant plugin list 2>/dev/null | grep -q '^vagrant-libvirt '; then
		vagrant validate
	else
		vagrant validate --ignore-provider
	fi
}

# limit SECONDS COMMAND... runs it in a process group of its own, which Ctrl-C
# does not reach, and leaves the shell free to act on signals.
child=""
limit() {
	seconds=$1
	shift
	nice timeout -k 30 "$seconds" "$@" 9<&- &
	child=$!
	code=0
	wait "$child" || code=$?
	child=""
	return $code
}

# LIBVIRT_* chains and the jumps to them, as arguments of iptables that remove
# them: first the jumps, then the contents, then the chains.
remove_chains() {
	for ipt in iptables ip6tables; do
		for table in filter nat mangle; do
			$ipt -w -t $table -S 2>/dev/null >"$own/rules" || continue
			sed -n 's/^-A \([A-Z]* .*-j LIBVIRT_.*\)/-D \1/p; s/^-N \(LIBVIRT_.*\)/-F \1/p' "$own/rules" >"$own/undo"
			sed -n 's/^-N \(LIBVIRT_.*\)/-X \1/p' "$own/rules" >>"$own/undo"
			while read -r line; do
				# shellcheck disable=SC2086
				$ipt -w -t $table $line
			done <"$own/undo"
		done
	done
}

# A libvirtd of our own, for machines where none runs (containers, CI). It sees
# its own /etc/libvirt and /var/lib/libvirt, so the host's stay as they are.
start_libvirtd() {
	[ "$(id -u)" = 0 ] || fail "no libvirtd answers at qemu:///system: start it, or run as root"
	say "starting a libvirtd of our own"
	mkdir -p "$own/etc" "$own/lib" "$own/cache" "$own/log" "$own/run"
	cat /proc/sys/net/ipv4/ip_forward >"$own/ip_forward"
	for ipt in iptables ip6tables; do
		for table in filter nat mangle; do
			$ipt -w -t $table -S 2>/dev/null | grep '^-N LIBVIRT_' || true
		done
	done >"$own/chains"
	cat >"$own/etc/qemu.conf" <<-'CONF'
		user = "root"
		group = "root"
		dynamic_ownership = 0
		remember_owner = 0
		security_driver = "none"
		stdio_handler = "file"
		namespaces = [ ]
		cgroup_controllers = [ ]
	CONF
	cat >"$own/libvirtd.conf" <<-CONF
		unix_sock_dir = "$own"
		auth_unix_rw = "none"
		auth_unix_ro = "none"
		unix_sock_rw_perms = "0700"
		unix_sock_ro_perms = "0700"
		unix_sock_admin_perms = "0700"
	CONF
	[ -d /run/libvirt ] || {
		mkdir /run/libvirt
		touch "$own/made-run"
	}
	launch_libvirtd || {
		tail -n 20 "$dir/libvirtd.log" >&2
		fail "libvirtd does not answer at $LIBVIRT_DEFAULT_URI"
	}
}

launch_libvirtd() {
	# Mounts that end on the host end here too. A session of its own: Ctrl-C
	# must not end it before the machine.
	# shellcheck disable=SC2016
	nice setsid unshare --mount --propagation slave sh -ec '
		mount --bind "$1/etc" /etc/libvirt
		mount --bind "$1/lib" /var/lib/libvirt
		mount --bind "$1/cache" /var/cache/libvirt
		mount --bind "$1/log" /var/log/libvirt
		mount --bind "$1/run" /run/libvirt
		exec libvirtd --config "$1/libvirtd.conf" --pid-file "$1/libvirtd.pid"
	' sh "$own" >"$dir/libvirtd.log" 2>&1 </dev/null 9<&- &
	echo $! >"$own/pid"
	export LIBVIRT_DEFAULT_URI="qemu:///system?socket=$own/libvirt-sock"
	export JAIL_VM_POOL="$dir/pool"
	tries=0
	until virsh -q version >/dev/null 2>&1; do
		tries=$((tries + 1))
		[ $tries -lt 60 ] && kill -0 "$(cat "$own/pid")" 2>/dev/null || return 1
		sleep 1
	done
}

# is_own_libvirtd: the number may be another process's by now.
is_own_libvirtd() {
	[ -e "$own/pid" ] && tr '\0' ' ' 2>/dev/null <"/proc/$(cat "$own/pid")/cmdline" | grep -qF "$own/libvirtd.conf"
} 2>/dev/null

# Everything that our libvirtd runs is ours. If it was killed, another one finds
# in its files what it has left.
stop_libvirtd() {
	[ -d "$own" ] || return 0
	if is_own_libvirtd || { [ -e "$own/pid" ] && launch_libvirtd; }; then
		for domain in $(virsh -q list --name); do
			virsh -q destroy "$domain" >/dev/null || true
		done
		for network in $(virsh -q net-list --name); do
			virsh -q net-destroy "$network" >/dev/null || true
		done
	fi
	if is_own_libvirtd; then
		pid=$(cat "$own/pid")
		kill "$pid"
		tries=0
		while is_own_libvirtd; do
			tries=$((tries + 1))
			[ $tries -lt 100 ] || kill -9 "$pid"
			sleep 0.1
		done
	fi
	if [ -e "$own/chains" ] && ! [ -s "$own/chains" ]; then
		remove_chains
	fi
	if [ -e "$own/ip_forward" ] && [ "$(cat "$own/ip_forward")" != "$(cat /proc/sys/net/ipv4/ip_forward)" ]; then
		cat "$own/ip_forward" >/proc/sys/net/ipv4/ip_forward
	fi
	[ ! -e "$own/made-run" ] || rmdir /run/libvirt
	rm -rf "$own" "$dir/pool" "$VAGRANT_DOTFILE_PATH"
}

# Destroys the machine and ends what was started for it.
clean() {
	trap '' INT TERM HUP
	bad=0
	if [ -n "$child" ]; then
		kill "$child" 2>/dev/null || true
		wait "$child" || true
		child=""
	fi
	if [ -d "$VAGRANT_DOTFILE_PATH/machines" ]; then
		say "destroying the machine"
		limit 180 vagrant destroy -f >>"$dir/up.log" 2>&1 || bad=1
	fi
	if [ -n "${network_before+set}" ] && [ -z "$network_before" ] && ! [ -d "$own" ] && virsh -q net-info vagrant-libvirt >/dev/null 2>&1; then
		virsh -q net-destroy vagrant-libvirt || bad=1
		virsh -q net-undefine vagrant-libvirt || bad=1
	fi
	stop_libvirtd || bad=1
	rm -rf "$VAGRANT_DOTFILE_PATH" "$dir/ssh-config"
	[ $bad = 0 ] || echo "vagrant.sh: cleaning up failed, see above and $dir/up.log" >&2
	return $bad
}

at_exit() {
	status=$?
	clean || [ $status != 0 ] || status=1
	say "done, exit code $status"
	exit $status
}

# one PACKAGE FLAG runs one package's tests; the flag is the test binary's.
one() {
	package=${1#./} flag=$2
	name=$(echo "$package" | tr / _)
	log=$dir/logs/$name.log start=$(date +%s) result=ok
	# A cgroup of its own with the right to make others below, and no other
	# process in it: see package cgroup.
	limit 1500 ssh -n -F "$dir/ssh-config" default \
		sudo systemd-run --wait --pipe --collect --quiet -p Delegate=yes \
		-p "WorkingDirectory=/vagrant/$package" -E HOME=/root -E LANG=C.UTF-8 \
		-E JAIL_TEST_MACHINE=1 -E JAIL_COMMAND=/opt/jail-tests/jail \
		"/opt/jail-tests/$name.test" -test.v -test.timeout 20m "'$flag'" >"$log" 2>&1 || {
		result="FAIL (exit code $?)"
		failed=1
	}
	printf '%-10s %3d passed %2d failed %2d skipped %4d s  %s\n' "$package" \
		"$(count PASS)" "$(count FAIL)" "$(count SKIP)" $(($(date +%s) - start)) "$result $flag"
	grep -E '^ *--- SKIP' -A1 "$log" || true
	if [ "$result" != ok ]; then
		grep -E '^ *--- FAIL' "$log" || true
		# What was printed between a failing test's start and its verdict.
		awk '/^=== RUN/ {buf=""} {buf=buf $0 "\n"} /^ *--- FAIL/ {printf "%s", buf; buf=""} /^--- PASS/ {buf=""}' "$log" | tail -n 80 | cut -c 1-400
		echo "the end of $log:"
		tail -n 10 "$log" | cut -c 1-400
	fi
}

# scope runs the command in a login shell, with which it shares its cgroup: it
# asks systemd for a scope, holds its limits in there, and leaves none behind,
# also when it is killed.
scope() {
	log=$dir/logs/scope.log start=$(date +%s) result=ok
	# shellcheck disable=SC2016
	limit 300 ssh -n -F "$dir/ssh-config" default sudo sh -ec "'"'
		jail=/opt/jail-tests/jail
		scopes() { systemctl list-units --all --no-legend --plain "jail-*.scope" | wc -l; }
		code=0
		$jail run --memory 64MiB -- python3 -c "x = bytearray(1 << 28)" || code=$?
		[ $code = 137 ] || { echo "out of memory: exit code $code"; exit 1; }
		$jail run --wall 1h -- sh -c "echo up; sleep 3600" >/tmp/up &
		until [ -s /tmp/up ]; do sleep 0.1; done
		[ $(scopes) = 1 ] || { echo "scopes of a running command: $(scopes)"; exit 1; }
		cat /proc/$!/cgroup
		kill -9 $!
		for i in $(seq 100); do
			[ $(scopes) != 0 ] || break
			sleep 0.1
		done
		[ $(scopes) = 0 ] || { echo "scopes left: $(scopes)"; exit 1; }
	'"'" >"$log" 2>&1 || result="FAIL (exit code $?)"
	grep -q 'jail-[0-9]*\.scope' "$log" || result="FAIL (not in a scope)"
	printf '%-10s %-42s %4d s  %s\n' scope "a command in a login shell" $(($(date +%s) - start)) "$result"
	[ "$result" = ok ] || {
		failed=1
		cut -c 1-400 "$log"
	}
}

count() { grep -cE "^ *--- $1" "$log" || true; }

# slow TESTS is the flag that leaves these out: loops of hundreds of starts, each
# of which takes minutes in an emulated machine.
slow() {
	if [ "${JAIL_VM_SLOW:-}" = 1 ]; then echo -test.count=1; else echo "-test.skip=$1"; fi
}

case "${1:-}" in
setup)
	setup
	exit 0
	;;
validate)
	validate
	exit 0
	;;
esac
setup
if [ $# = 0 ]; then
	set -- cgroup jail rootfs seccomp cmd/jail
	all=yes
else
	all=no
fi

# One run at a time: the machine's name and the network's are the whole host's.
# A file that is there anyway is the lock.
exec 9<"$(command -v vagrant)"
flock -n 9 || fail "another run has not ended yet"

if [ "$VAGRANT_DEFAULT_PROVIDER" = libvirt ] && [ -z "${JAIL_VM_DRIVER:-}" ]; then
	# Processors without these flags can have a /dev/kvm that fails later.
	if grep -qwE 'vmx|svm' /proc/cpuinfo && [ -w /dev/kvm ]; then
		JAIL_VM_DRIVER=kvm
	else
		JAIL_VM_DRIVER=qemu
	fi
fi
export JAIL_VM_DRIVER="${JAIL_VM_DRIVER:-kvm}"
if [ -z "${JAIL_BOX:-}" ]; then
	JAIL_BOX=debian/bookworm64
	if [ "$VAGRANT_DEFAULT_PROVIDER" = libvirt ] && vagrant box list 2>/dev/null | grep -q '^jail/bookworm '; then
		JAIL_BOX=jail/bookworm
	fi
fi
export JAIL_BOX

say "building the test binaries of $*"
if ! [ -e jail/jailinit/jail-init ] || ! [ -e seccomp/program_ahead.go ]; then
	make --no-print-directory build
fi
rm -rf "$dir/tests" "$dir/logs" "$dir/up.log"
mkdir -p "$dir/tests" "$dir/logs"
go build -tags "$tags" -ldflags '-s -w -extldflags "-static"' -o "$dir/tests/jail" ./cmd/jail
for package in "$@"; do
	package=${package#./}
	go test -c -tags "$tags" -ldflags '-s -w -extldflags "-static"' -o "$dir/tests/$(echo "$package" | tr / _).test" "./$package"
done

trap at_exit EXIT
trap 'exit 130' INT TERM HUP
# What a run that was killed has left.
if [ -d "$own" ]; then
	say "cleaning up after a run that was killed"
	stop_libvirtd
fi
if [ "$VAGRANT_DEFAULT_PROVIDER" = libvirt ]; then
	if ! virsh -q -c qemu:///system version >/dev/null 2>&1; then
		start_libvirtd
	else
		export LIBVIRT_DEFAULT_URI=qemu:///system
	fi
	network_before=$(virsh -q net-list --all --name | grep -x vagrant-libvirt || true)
fi

say "vagrant up: box $JAIL_BOX, provider $VAGRANT_DEFAULT_PROVIDER, driver $JAIL_VM_DRIVER"
limit 1800 vagrant --no-tty up >"$dir/up.log" 2>&1 || {
	tail -n 30 "$dir/up.log" >&2
	fail "vagrant up failed, all of it is in $dir/up.log"
}
vagrant ssh-config 9<&- >"$dir/ssh-config"
printf '  ServerAliveInterval 30\n  ServerAliveCountMax 10\n' >>"$dir/ssh-config"
kernel=$(ssh -n -F "$dir/ssh-config" default uname -r 9<&-)
say "testing on Linux $kernel; logs are in $dir/logs"
failed=0
for package in "$@"; do
	flag=-test.count=1
	if [ $all = yes ]; then
		case $package in
		cgroup) flag=$(slow 'TestKillEndsEverything|TestLaunchersAndCollectorsRace|TestNothingIsLeftOfALeaf') ;;
		jail) flag=$(slow TestManyJailsLeaveNothing) ;;
		rootfs) flag=$(slow TestPinsAreBounded) ;;
		# It has the README's wall-clock budget, which emulation exceeds.
		cmd/jail) [ "$JAIL_VM_DRIVER" != qemu ] || flag=$(slow TestReadmeTranscripts) ;;
		esac
	fi
	one "$package" "$flag"
done
scope
if [ $all = yes ]; then
	cat "$dir"/logs/*.log >"$dir/all.log"
	./scripts/proven.py "$dir/all.log" || failed=1
fi
exit $failed
