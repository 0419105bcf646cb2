//! One parent: its connections, how fast it answers, and whether it comes last.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::connection::{Connection, Lost};
use super::{Fault, HUNG, Left, Parent};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(2);

/// A parent is never late before this: a machine that is busy for a moment is no reason to ask twice.
const LEAST_PATIENCE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub struct Route {
    pub parent: Parent,
    state: Mutex<State>,
    wanted: watch::Sender<usize>,
    changed: Arc<Notify>,
    closed: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    connections: Vec<Arc<Connection>>,
    rests_until: Option<Instant>,
    /// The mean time of an answer, and its mean deviation (RFC 6298, section 2).
    mean: Duration,
    deviation: Duration,
}

impl Route {
    /// Begins to connect when connections are wanted.
    pub fn start(
        parent: Parent,
        changed: Arc<Notify>,
        closed: CancellationToken,
        left: mpsc::UnboundedSender<Left>,
    ) -> Arc<Self> {
        let route = Arc::new(Self { parent, state: Mutex::default(), wanted: watch::Sender::new(0), changed, closed });
        tokio::spawn(keep_connected(route.clone(), left));
        route
    }

    /// How many connections there are to be.
    pub fn want(&self, connections: usize) {
        self.wanted.send_replace(connections);
    }

    /// Ends all connections, and waits for that.
    pub async fn close(&self) {
        self.closed.cancel();
        let connections = std::mem::take(&mut self.state().connections);
        for connection in connections {
            connection.close().await;
        }
    }

    #[must_use]
    pub fn connected(&self) -> bool {
        self.state().connections.iter().any(|connection| !connection.ended())
    }

    /// Comes last for so long, and gets new connections. Returns whether it did not rest already.
    pub fn rest(&self, time: Duration) -> bool {
        let mut state = self.state();
        let now = Instant::now();
        let rested = state.rests_until.is_some_and(|until| until > now);
        state.rests_until = state.rests_until.max(Some(now + time));
        state.connections.drain(..).for_each(|connection| connection.cancel());
        !rested
    }

    /// Until when it comes last; none if it does not.
    #[must_use]
    pub fn rests_until(&self) -> Option<Instant> {
        self.state().rests_until.filter(|&until| until > Instant::now())
    }

    /// The mean time of its answers.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.state().mean
    }

    /// How long to wait for an answer before it is late: hardly any of its answers takes longer.
    #[must_use]
    pub fn patience(&self) -> Duration {
        let state = self.state();
        (state.mean + 4 * state.deviation).max(LEAST_PATIENCE)
    }

    /// Whether requests wait, and nothing has come for too long.
    #[must_use]
    pub fn hangs(&self) -> bool {
        self.state().connections.iter().any(|connection| connection.stalled() >= HUNG)
    }

    /// Reads a range, in bytes, by the connection with the least to do.
    ///
    /// # Errors
    /// The connection ends, or the parent refuses.
    pub async fn read(&self, offset: u64, length: u32) -> Result<Bytes, Lost> {
        let begun = Instant::now();
        let least = {
            let state = self.state();
            let live = state.connections.iter().filter(|connection| !connection.ended());
            live.min_by_key(|connection| connection.in_flight()).cloned().ok_or(Lost::Ended)?
        };
        let data = least.read(offset, length).await?;
        self.note(begun.elapsed());
        Ok(data)
    }

    /// The connections that live. Of those beyond `most` the idle ones end.
    fn live(&self, most: usize) -> Vec<Arc<Connection>> {
        let mut state = self.state();
        let mut kept = 0;
        state.connections.retain(|connection| {
            let stays = !connection.ended() && (kept < most || connection.in_flight() > 0);
            kept += usize::from(stays);
            stays
        });
        state.connections.clone()
    }

    fn note(&self, took: Duration) {
        let mut state = self.state();
        if state.mean.is_zero() {
            (state.mean, state.deviation) = (took, took / 2);
        } else {
            state.deviation = (state.deviation * 3 + state.mean.abs_diff(took)) / 4;
            state.mean = (state.mean * 7 + took) / 8;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has as many connections as are wanted, until the route is closed.
async fn keep_connected(route: Arc<Route>, left: mpsc::UnboundedSender<Left>) {
    let mut wanted = route.wanted.subscribe();
    let mut retry = FIRST_RETRY;
    let closed = route.closed.clone();
    let work = async {
        loop {
            let number = *wanted.borrow_and_update();
            let live = route.live(number);
            if live.len() >= number {
                tokio::select! { () = any_ends(&live) => {}, _ = wanted.changed() => {} }
                continue;
            }
            match Connection::open(&route.parent.endpoint).await {
                Ok(connection) => {
                    retry = FIRST_RETRY;
                    route.state().connections.push(Arc::new(connection));
                    route.changed.notify_waiters();
                }
                Err(error) => {
                    tracing::debug!(host = route.parent.host, %error, "a parent cannot be reached");
                    if live.is_empty() && retry == FIRST_RETRY {
                        let _ = left.send(Left { host: route.parent.host.clone(), fault: Fault::Dead });
                    }
                    sleep(retry).await;
                    retry = (retry * 2).min(LAST_RETRY);
                }
            }
        }
    };
    tokio::select! { () = work => {}, () = closed.cancelled() => {} }
}

/// Resolves when one of the connections has ended; never if there is none.
async fn any_ends(connections: &[Arc<Connection>]) {
    let mut ends: Vec<_> = connections.iter().map(|connection| Box::pin(connection.end())).collect();
    std::future::poll_fn(|context| {
        let ended = ends.iter_mut().any(|end| end.as_mut().poll(context).is_ready());
        if ended { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}
