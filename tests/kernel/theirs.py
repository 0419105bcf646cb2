"""What somebody else has on a host: LVM with a thin pool, a multipath map, an iSCSI session, a target, a bcache set."""

from __future__ import annotations

from lab.kernel.machine import Machine
from lab.kernel.storage import Storage

SIZE = 8 << 20

_MAKE = """
set -e
cd /var/tmp
loop() { fallocate -l "$2" "their-$1"; losetup --find --show "/var/tmp/their-$1"; }
volumes=$(loop lvm 160M)
pvcreate --quiet "$volumes"
vgcreate --quiet theirs "$volumes"
lvcreate --quiet --size 32M --thinpool pool theirs
lvcreate --quiet --virtualsize 16M --thin --name thin theirs/pool
lvcreate --quiet --size 8M --name plain theirs
modprobe bcache
# Not by way of udev, which might be faster or not.
cached=$(loop cached 16M) cache=$(loop cache 32M)
make-bcache --bucket 16k -C "$cache" -B "$cached"
for device in $cached $cache; do echo "$device" > /sys/fs/bcache/register || true; done
until test -e /dev/bcache0 -a -e /sys/block/bcache0/bcache/cache; do sleep 0.1; done
mkdir -p /etc/target
echo '{"storage_objects": [], "targets": []}' > /etc/target/saveconfig.json
modprobe dm_multipath
modprobe dm_service_time
disk=$(readlink -f "$1") sectors=$(blockdev --getsz "$1")
dmsetup create their-multipath --table "0 $sectors multipath 1 queue_if_no_path 0 1 1 service-time 0 1 0 $disk"
for device in theirs/thin theirs/plain bcache0 mapper/their-multipath; do
  head -c 4M /dev/urandom | dd of=/dev/$device conv=fsync status=none
done
"""

_READ = "sha256sum /dev/theirs/thin /dev/theirs/plain /dev/bcache0 /dev/mapper/their-multipath"

_LOOK = f"""
set -e
{_READ}
lvm <<LVM
pvs --options pv_name,pv_uuid,pv_size,pv_free,pv_mda_count
vgs --options vg_name,vg_uuid,vg_attr,vg_free,vg_seqno
lvs --all --options lv_full_name,lv_uuid,lv_attr,lv_size,data_percent,metadata_percent
LVM
ours='^virtman-'
dmsetup info --columns --noheadings --options name,uuid,major,minor,open,attr | grep -v "$ours" | sort
for map in $(dmsetup info --columns --noheadings --options name | grep -v "$ours" | sort); do
  dmsetup table "$map"
  dmsetup status "$map"
done
losetup --list --raw --noheadings --output NAME,RO,DIO,AUTOCLEAR,BACK-FILE | grep /var/tmp/ | sort
for session in /sys/class/iscsi_session/session*; do
  grep -q virtman $session/targetname ||
    grep -H . $session/targetname $session/state $session/*_tmo $session/device/target*/*/timeout
done
find /etc/iscsi /var/lib/iscsi /etc/target /etc/multipath /etc/lvm -type f ! -path '*org.virtman*' \\
  -printf '%p %s %T@\\n' | sort
cd /sys/kernel/config/target
find . -path '*example*' -o -path '*/a-volume*' | sort
grep -r . core/*/a-volume/attrib iscsi/*example*/tpgt_1/attrib iscsi/*example*/tpgt_1/enable | sort
set=$(basename "$(readlink -f /sys/block/bcache0/bcache/cache)")
ls /sys/fs/bcache/$set
cd /sys/block/bcache0/bcache
head -v state cache_mode sequential_cutoff running writeback_percent
cd /sys/module
grep -r . dm_mod/parameters dm_multipath/parameters dm_thin_pool/parameters loop/parameters scsi_mod/parameters \\
  *iscsi*/parameters | sort
systemctl show --property=MainPID iscsid.service multipathd.service
"""

_REMOVE = """
dmsetup remove their-multipath
echo 1 > "$(readlink -f /sys/block/bcache0/bcache/cache)/stop"
while test -e /dev/bcache0; do sleep 0.1; done
vgremove --quiet --yes --force theirs
for file in /var/tmp/their-*; do
  losetup --detach "$(losetup --noheadings --output NAME --associated $file)"
  rm $file
done
rm /etc/target/saveconfig.json
udevadm settle
"""


class Theirs:
    """``machine`` has all of it, and a session with ``storage``, another one. All calls raise CommandFailed."""

    def __init__(self, machine: Machine, storage: Machine) -> None:
        self._machine, self._own, self._storage = machine, Storage(machine), Storage(storage)

    def make(self) -> None:
        """Make all of it, with something in each."""
        self._storage.serve(SIZE)
        self._storage.log_in(self._machine)
        self._own.serve(SIZE)
        self._machine.run(["sh", "-c", _MAKE, "make", str(self._storage.device)])

    def look(self) -> list[str]:
        """What is there, how it is set, and sums of what it holds: all that must be the same afterwards."""
        return self._machine.run(["sh", "-c", _LOOK]).splitlines()

    def activate_again(self) -> None:
        """Have LVM let its volumes go and find them again."""
        self._machine.run(["vgchange", "--quiet", "--activate", "n", "theirs"])
        self._machine.run(["vgchange", "--quiet", "--activate", "y", "theirs"])

    def remove(self) -> None:
        """Leave nothing of it."""
        self._machine.run(["sh", "-c", _REMOVE])
        self._storage.log_out(self._machine)
        self._storage.withdraw()
        self._own.withdraw()
