#!/bin/busybox sh
# The first process in the machine's memory disk: it loads the modules for the real disk and continues there.
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t sysfs none /sys
for module in virtio_pci virtio_blk loop overlay btrfs; do
    /bin/busybox modprobe "$module" || echo "VM NOTE no module $module"
done
/bin/busybox mount -t ext4 /dev/vda /disk || echo "VM FAIL boot the disk cannot be mounted"
/bin/busybox mount --move /dev /disk/dev
/bin/busybox mount --move /proc /disk/proc
/bin/busybox mount --move /sys /disk/sys
checks=$(/bin/busybox sed -n 's/.*coracle.checks=\([^ ]*\).*/\1/p' /disk/proc/cmdline)
exec /bin/busybox switch_root /disk /usr/bin/busybox sh "/${checks:-checks}.sh"
