//! Reads that never wait for a disk.

use std::fs::File;
use std::io::IoSliceMut;

use rustix::io::{Errno, ReadWriteFlags};

/// Reads from memory what is there. `AGAIN`: it may have to be waited for, as all that file systems read which do not know
/// such reads (preadv2(2), `RWF_NOWAIT`). `IO`: the file ends early.
pub fn read(file: &File, at: u64, into: &mut [u8]) -> Result<(), Errno> {
    let length = into.len();
    match rustix::io::preadv2(file, &mut [IoSliceMut::new(into)], at, ReadWriteFlags::NOWAIT) {
        Ok(read) if read == length => Ok(()),
        Ok(0) => Err(Errno::IO),
        Ok(_) | Err(Errno::OPNOTSUPP) => Err(Errno::AGAIN),
        Err(error) => Err(error),
    }
}
