//! Reads that never wait for a disk.

use std::fs::File;
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, ReadWriteFlags};

/// Whether the kernel knows the flag for all files that were tried; tmpfs does not, and never waits.
static KNOWN: AtomicBool = AtomicBool::new(true);

/// Reads from memory what is there. `AGAIN`: a disk has to be waited for. `IO`: the file ends early.
pub fn read(file: &File, at: u64, into: &mut [u8]) -> Result<(), Errno> {
    let length = into.len();
    let read = if KNOWN.load(Ordering::Relaxed) {
        match rustix::io::preadv2(file, &mut [IoSliceMut::new(into)], at, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP) => {
                KNOWN.store(false, Ordering::Relaxed);
                rustix::io::pread(file, &mut *into, at)?
            }
            Ok(read) if read < length && read > 0 => return Err(Errno::AGAIN),
            other => other?,
        }
    } else {
        rustix::io::pread(file, &mut *into, at)?
    };
    if read == length { Ok(()) } else { Err(Errno::IO) }
}
