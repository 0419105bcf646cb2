"""Linux's block layer: device-mapper, loop devices, bcache, SCSI disks, sockets."""
