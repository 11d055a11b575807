#!/bin/sh
# Makes a Debian box for Vagrant's libvirt provider from Debian's packages and
# adds it as jail/bookworm: for machines that cannot download a box. What the
# tests need is in it. scripts/vagrant.sh takes this box where it exists.
#
# Usage: vagrant-box.sh
# Environment: JAIL_VM_MIRROR  where the packages come from (Debian's)
set -eu
cd "$(dirname "$0")/.."

box=jail/bookworm
dir=$PWD/build/vagrant
# The name begins with a dot: no Go package may seem to be in there.
work=$dir/.box
# Vagrant makes this directory wherever it runs.
export VAGRANT_DOTFILE_PATH="$work/vagrant"
begin=$(date +%s)

say() { printf 'vagrant-box: %4d s: %s\n' $(($(date +%s) - begin)) "$*"; }

if [ "$(id -u)" != 0 ]; then
	echo "vagrant-box.sh: making an image needs root: it mounts it" >&2
	exit 1
fi

rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

# Installs what is missing, by Debian package name.
missing=""
need() { # need PACKAGE TEST...
	package=$1
	shift
	"$@" >/dev/null 2>&1 || missing="$missing $package"
}
need vagrant command -v vagrant
need vagrant-libvirt sh -c "vagrant plugin list | grep -q '^vagrant-libvirt '"
need mmdebstrap command -v mmdebstrap
need debian-archive-keyring test -e /usr/share/keyrings/debian-archive-keyring.gpg
need e2fsprogs command -v mke2fs
need extlinux command -v extlinux
need syslinux-common test -e /usr/lib/syslinux/modules/bios/ldlinux.c32
need qemu-utils command -v qemu-img
need rsync command -v rsync
need openssh-client command -v ssh
if [ -n "$missing" ]; then
	say "installing$missing"
	apt-get update -qq
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

# The key that every new Vagrant machine trusts until its first start, when
# Vagrant replaces it.
key=$({ dpkg -L vagrant 2>/dev/null || find /opt/vagrant -type f; } | grep '/keys/vagrant\.pub$' | head -n 1)
[ -n "$key" ] || {
	echo "vagrant-box.sh: no keys/vagrant.pub in Vagrant's files" >&2
	exit 1
}

packages=$(sed -n 's/^PACKAGES = %w\[\(.*\)\]$/\1/p' Vagrantfile | tr ' ' ',')
[ -n "$packages" ] || {
	echo "vagrant-box.sh: no line PACKAGES = %w[...] in the Vagrantfile" >&2
	exit 1
}
machine=linux-image-cloud-amd64,systemd-sysv,udev,dbus,openssh-server,sudo,ifupdown,isc-dhcp-client,kmod

root=$work/root

say "Debian bookworm with $machine,$packages (a minute or two)"
# shellcheck disable=SC2086
nice mmdebstrap --quiet --variant=minbase --include="$machine,$packages" \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	bookworm "$root" ${JAIL_VM_MIRROR:-} >"$dir/box.log" 2>&1 || {
	tail -n 30 "$dir/box.log" >&2
	exit 1
}

say "setting it up: user vagrant, network, boot"
chroot "$root" useradd -m -s /bin/bash vagrant
install -d -m 0700 "$root/home/vagrant/.ssh"
install -m 0600 "$key" "$root/home/vagrant/.ssh/authorized_keys"
chroot "$root" chown -R vagrant:vagrant /home/vagrant/.ssh
echo 'vagrant ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/vagrant"
chmod 0440 "$root/etc/sudoers.d/vagrant"
echo bookworm >"$root/etc/hostname"
printf '127.0.0.1 localhost bookworm\n::1 localhost\n' >"$root/etc/hosts"
: >"$root/etc/machine-id"
printf 'auto lo\niface lo inet loopback\nauto eth0\niface eth0 inet dhcp\n' >"$root/etc/network/interfaces"
echo '/dev/vda / ext4 defaults 0 1' >"$root/etc/fstab"
rm -f "$root/etc/resolv.conf"
: >"$root/etc/resolv.conf"
# The first two cost 10 s of an emulated boot, the others disturb the tests.
for unit in ifupdown-pre.service e2scrub_reap.service e2scrub_all.timer apt-daily.timer apt-daily-upgrade.timer fstrim.timer; do
	ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
install -d "$root/boot/extlinux"
cat >"$root/boot/extlinux/extlinux.conf" <<-'CONF'
	default debian
	label debian
	  linux /vmlinuz
	  initrd /initrd.img
	  append root=/dev/vda ro net.ifnames=0 console=ttyS0 quiet
CONF

say "writing the image"
truncate -s 4G "$work/box.raw"
# extlinux reads neither 64bit nor metadata_csum.
mke2fs -q -F -t ext4 -O '^64bit,^metadata_csum' -d "$root" "$work/box.raw"
rm -rf "$root"
# A file system without partitions: the boot loader is in its first sector. The
# mount is seen by this command only, and ends with it.
mkdir "$work/mnt"
unshare --mount --propagation slave sh -ec 'mount -o loop "$1/box.raw" "$1/mnt"; extlinux --install "$1/mnt/boot/extlinux"; umount "$1/mnt"' sh "$work" >>"$dir/box.log" 2>&1 || {
	tail -n 5 "$dir/box.log" >&2
	exit 1
}
qemu-img convert -O qcow2 "$work/box.raw" "$work/box.img"
rm "$work/box.raw"
echo '{"provider":"libvirt","format":"qcow2","virtual_size":4}' >"$work/metadata.json"
echo 'Vagrant.configure("2") { |config| config.vm.provider("libvirt") { |v| v.disk_bus = "virtio" } }' >"$work/Vagrantfile"
tar -C "$work" -cf "$work/local.box" metadata.json Vagrantfile box.img

say "vagrant box add $box: $(du -h "$work/local.box" | cut -f1)"
vagrant box add --force --provider libvirt --name "$box" "$work/local.box" >>"$dir/box.log" 2>&1 || {
	tail -n 10 "$dir/box.log" >&2
	exit 1
}
say "done"
