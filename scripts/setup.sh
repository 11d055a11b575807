#!/bin/sh
# Installs what is missing, by Debian package name. Usage: setup.sh PART...
# Parts: build (compiling and running), test, bench.
set -eu

missing=""
need() { # need PACKAGE TEST...
	package=$1
	shift
	"$@" >/dev/null 2>&1 || missing="$missing $package"
}

for part in "$@"; do
	case $part in
	build)
		need gcc sh -c 'command -v gcc'
		need make sh -c 'command -v make'
		need pkg-config sh -c 'command -v pkg-config'
		need libseccomp-dev sh -c 'pkg-config --exists libseccomp'
		need libc6-dev test -e /usr/include/stdio.h
		need linux-libc-dev test -e /usr/include/linux/close_range.h
		need python3 test -x /usr/bin/python3
		;;
	test)
		need nodejs test -x /usr/bin/node
		need busybox-static test -x /usr/bin/busybox
		need sqlite3 sh -c 'command -v sqlite3'
		;;
	bench)
		need busybox-static test -x /usr/bin/busybox
		need bubblewrap sh -c 'command -v bwrap'
		need runc sh -c 'command -v runc'
		need crun sh -c 'command -v crun'
		;;
	*)
		echo "setup.sh: unknown part $part" >&2
		exit 2
		;;
	esac
done

if ! command -v go >/dev/null 2>&1; then
	echo "setup.sh: Go 1.26 or newer is needed: install it and put it in PATH" >&2
	exit 1
fi
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
	echo "setup.sh: missing packages:$missing; run as root or install them" >&2
	exit 1
fi
echo "installing:$missing"
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
