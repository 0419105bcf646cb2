//! Event loops of one thread each.
//!
//! Who connects gets one of them by turns, and each has connections of its own to parents. So a read wakes up no other thread,
//! whether what is read is here or comes from a parent.

use std::future::pending;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tokio::runtime::{Builder, Handle};

/// Without any, all is done where the caller is.
#[derive(Debug, Default)]
pub struct Loops {
    handles: Vec<Handle>,
    turn: AtomicUsize,
}

impl Loops {
    /// Starts so many loops, which end with the process.
    ///
    /// # Errors
    /// The kernel gives no thread, or no epoll(7).
    pub fn start(number: usize) -> io::Result<Self> {
        let event_loop = |_| {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let handle = runtime.handle().clone();
            thread::Builder::new().name("loop".to_owned()).spawn(move || runtime.block_on(pending::<()>()))?;
            Ok(handle)
        };
        Ok(Self { handles: (0..number).map(event_loop).collect::<io::Result<_>>()?, turn: AtomicUsize::new(0) })
    }

    /// The next one, by turns.
    pub fn next(&self) -> Handle {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let of_turn = turn.checked_rem(self.handles.len()).and_then(|number| self.handles.get(number));
        of_turn.cloned().unwrap_or_else(Handle::current)
    }
}
