//! Whether somebody waits for what is asked.

use tokio::sync::watch;

/// Of one fetch. It only ever rises: a read may join what was asked for when nobody waited.
#[derive(Debug)]
pub struct Urgency(watch::Sender<bool>);

impl Urgency {
    #[must_use]
    pub fn new(urgent: bool) -> Self {
        Self(watch::Sender::new(urgent))
    }

    pub fn raise(&self) {
        self.0.send_replace(true);
    }

    #[must_use]
    pub fn is_urgent(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves when somebody waits.
    pub async fn urgent(&self) {
        let _ = self.0.subscribe().wait_for(|&urgent| urgent).await;
    }
}
