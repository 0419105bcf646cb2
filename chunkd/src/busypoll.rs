//! Whether to stay awake for a client's next request.
//!
//! A processor that sleeps takes longer to wake up than a small read takes. QEMU's event loops poll for the same reason
//! (`poll-max-ns` of its iothreads).

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use tokio::task::yield_now;
use tokio::time::Instant;

/// How long to stay awake.
const MOMENT: Duration = Duration::from_micros(100);

/// After a request that does not come in time, so many further ones are not waited for: a slow client costs little.
const REST: u8 = 32;

#[derive(Debug, Default)]
pub struct BusyPoll {
    rest: u8,
}

impl BusyPoll {
    /// The result of an act, if it ends within a moment. For an event loop of one thread: others on it go on meanwhile.
    pub async fn wait<T>(&mut self, act: impl Future<Output = T>) -> Option<T> {
        if self.rest > 0 {
            self.rest -= 1;
            return None;
        }
        let mut act = pin!(act);
        let begun = Instant::now();
        loop {
            if let Poll::Ready(result) = poll!(&mut act) {
                return Some(result);
            }
            if begun.elapsed() >= MOMENT {
                self.rest();
                return None;
            }
            yield_now().await;
        }
    }

    /// Does not stay awake for the next requests.
    pub fn rest(&mut self) {
        self.rest = REST;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn who_comes_late_once_is_not_waited_for_at_once_again() {
        let mut busy = BusyPoll::default();
        assert_eq!([Some(1), Some(2)], [busy.wait(ready(1)).await, busy.wait(ready(2)).await]);
        assert_eq!(None, busy.wait(pending::<()>()).await);
        for _ in 0..REST {
            assert_eq!(None, busy.wait(ready(())).await);
        }
        assert_eq!(Some(()), busy.wait(ready(())).await);
    }

    #[tokio::test(start_paused = true)]
    async fn others_go_on_while_one_is_waited_for() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let other = tokio::spawn(async move { sender.send(()) });
        let mut busy = BusyPoll::default();
        assert_eq!(Some(Ok(())), busy.wait(receiver).await);
        other.await.unwrap().unwrap();
    }
}
