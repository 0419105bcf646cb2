"""A lab of guests with Debian's kernel, whose LIO, open-iscsi, multipath, bcache and device-mapper are real."""
