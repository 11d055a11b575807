#!/bin/sh
# Installs the peers that "make bench-peers" measures, from Debian's packages and
# the Go module proxy. One that cannot be had is said; the benchmark then lists
# it as not installed.
#
# nsjail, isolate, minijail0 and go-judge are in neither place. They are measured
# if they are in PATH or in JAIL_PEERS_DIR (build/peers), where runsc goes, too.
set -eu
cd "$(dirname "$0")/.."

dir=${JAIL_PEERS_DIR:-build/peers}
runsc=gvisor.dev/gvisor/runsc@v0.0.0-20260905035102-160fafc42237

updated=no
need() { # need PACKAGE PROGRAM
	command -v "$2" >/dev/null 2>&1 && return
	if [ "$(id -u)" != 0 ]; then
		echo "peers: $2 is missing; install the package $1, or run as root"
		return
	fi
	echo "peers: installing $1"
	if [ $updated = no ]; then
		apt-get update -qq || true
		updated=yes
	fi
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null ||
		echo "peers: $1 cannot be installed; $2 is not measured"
}

need bubblewrap bwrap
need runc runc
need crun crun
need firejail firejail
need systemd-container systemd-nspawn

mkdir -p "$dir"
if ! [ -x "$dir/runsc" ] && ! command -v runsc >/dev/null 2>&1; then
	echo "peers: building runsc (gVisor), a minute or two"
	GOBIN=$(realpath "$dir") CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' "$runsc" ||
		echo "peers: runsc cannot be built; it is not measured"
fi
