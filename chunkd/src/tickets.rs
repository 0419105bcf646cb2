//! Who may read an image from this host.
//!
//! Volt gives this host a *serving key* for each image, and gives each child a *ticket*: a key that follows from the serving
//! key, the child's name and the revision of the child's assignment. So this host knows a child that Volt has just named,
//! before this host hears of the child. A child that a newer list does not name is refused (volt/edgesecrets.py).

use std::collections::{HashMap, HashSet};

use openssl::hash::MessageDigest;
use openssl::pkey::PKey;
use openssl::sign::Signer;
use tokio_util::sync::CancellationToken;

use crate::tls::Key;

/// What a child says of itself: `IMAGE/CHILD/REVISION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim<'a> {
    pub image: &'a str,
    pub child: &'a str,
    pub revision: u64,
}

impl<'a> Claim<'a> {
    #[must_use]
    pub fn parse(identity: &'a str) -> Option<Self> {
        let mut parts = identity.split('/');
        let claim = Self { image: parts.next()?, child: parts.next()?, revision: parts.next()?.parse().ok()? };
        parts.next().is_none().then_some(claim)
    }
}

/// The ticket of a child. None if OpenSSL fails.
#[must_use]
pub fn ticket(serving: &Key, child: &str, revision: u64) -> Option<Key> {
    let key = PKey::hmac(&serving.0).ok()?;
    let mut signer = Signer::new(MessageDigest::sha256(), &key).ok()?;
    let mut ticket = Key([0; 32]);
    let written = signer.sign_oneshot(&mut ticket.0, format!("{child}/{revision}").as_bytes()).ok()?;
    (written == ticket.0.len()).then_some(ticket)
}

/// Who may read one image, as of a revision of this host's assignment.
#[derive(Debug)]
pub struct Readers {
    serving: Key,
    revision: u64,
    children: HashSet<String>,
    /// Those who were let in: by which revision, and what cuts them off.
    connected: HashMap<String, (u64, CancellationToken)>,
}

impl Readers {
    #[must_use]
    pub fn new(serving: Key) -> Self {
        Self { serving, revision: 0, children: HashSet::new(), connected: HashMap::new() }
    }

    /// Takes a newer list of children: those that it does not name are cut off, but for those who are newer still.
    pub fn hear(&mut self, serving: Key, revision: u64, children: Vec<String>) {
        if revision < self.revision {
            return;
        }
        (self.serving, self.revision) = (serving, revision);
        self.children = children.into_iter().collect();
        let connected = std::mem::take(&mut self.connected);
        let (stay, go): (HashMap<_, _>, HashMap<_, _>) =
            connected.into_iter().partition(|(child, (revision, _))| self.admits(child, *revision));
        self.connected = stay;
        for (_, cut) in go.into_values() {
            cut.cancel();
        }
    }

    fn admits(&self, child: &str, revision: u64) -> bool {
        self.children.contains(child) || revision > self.revision
    }

    /// The key with which a child proves its claim.
    #[must_use]
    pub fn key(&self, claim: Claim<'_>) -> Option<Key> {
        if self.admits(claim.child, claim.revision) { ticket(&self.serving, claim.child, claim.revision) } else { None }
    }

    /// What cuts off a child that has proven its claim; none if the child is not admitted any more.
    pub fn let_in(&mut self, claim: Claim<'_>) -> Option<CancellationToken> {
        if !self.admits(claim.child, claim.revision) {
            return None;
        }
        let (revision, cut) = self.connected.entry(claim.child.to_owned()).or_default();
        *revision = claim.revision.max(*revision);
        Some(cut.clone())
    }
}

impl Drop for Readers {
    /// The image is served no more.
    fn drop(&mut self) {
        for (_, cut) in self.connected.values() {
            cut.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key(std::array::from_fn(|at| u8::try_from(at).unwrap()))
    }

    fn claim(child: &str, revision: u64) -> Claim<'_> {
        Claim { image: "image", child, revision }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_ticket_is_that_of_volt() {
        let wanted = "4ed7ac4931a51fe1f4e7188b891d8dc8548be5cd901e968a32207f4908aebcd1";
        assert_eq!(wanted, blake3::Hash::from(ticket(&key(), "host-1", 17).unwrap().0).to_hex().as_str());
    }

    #[test]
    fn an_identity_has_three_parts() {
        assert_eq!(Some(claim("host", 7)), Claim::parse("image/host/7"));
        for bad in ["", "image", "image/host", "image/host/", "image/host/x", "image/host/-1", "image/host/7/8"] {
            assert_eq!(None, Claim::parse(bad), "{bad}");
        }
    }

    #[test]
    fn a_child_is_known_before_and_after_it_is_named_and_refused_when_it_is_named_no_more() {
        let mut readers = Readers::new(key());
        readers.hear(key(), 5, names(&["old"]));
        assert!(readers.key(claim("new", 6)).is_some());
        assert!(readers.key(claim("new", 5)).is_none());
        let cut = readers.let_in(claim("new", 6)).unwrap();
        readers.hear(key(), 7, names(&["old", "new"]));
        assert!(readers.key(claim("new", 6)).is_some() && !cut.is_cancelled());
        readers.hear(key(), 8, names(&["old"]));
        assert!(readers.key(claim("new", 6)).is_none() && cut.is_cancelled());
        assert!(readers.let_in(claim("new", 6)).is_none());
    }

    #[test]
    fn an_older_list_changes_nothing_and_a_newer_child_outlives_a_list() {
        let mut readers = Readers::new(key());
        readers.hear(key(), 5, names(&["one"]));
        readers.hear(key(), 4, names(&["two"]));
        assert!(readers.key(claim("one", 1)).is_some() && readers.key(claim("two", 1)).is_none());
        let cut = readers.let_in(claim("late", 9)).unwrap();
        readers.hear(key(), 8, names(&["one"]));
        assert!(!cut.is_cancelled());
        readers.hear(key(), 9, names(&["one"]));
        assert!(cut.is_cancelled());
    }

    #[test]
    fn the_end_of_an_image_cuts_all_off() {
        let mut readers = Readers::new(key());
        let cut = readers.let_in(claim("one", 1)).unwrap();
        drop(readers);
        assert!(cut.is_cancelled());
    }
}
