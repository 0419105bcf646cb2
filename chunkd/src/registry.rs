//! What this host serves, and to whom.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::fetch::{Endpoint, Fault, Left, Parent, Use};
use crate::image::{Class, Image, Shared};
use crate::kept::{Kept, Notes};
use crate::limits::Limits;
use crate::loops::Loops;
use crate::manifest::{LARGEST, Layout, unhex};
use crate::pool::Pool;
use crate::serve::{Export, Exports};
use crate::tickets::{Claim, Readers};
use crate::tls::Key;

/// What is wrong with a call.
#[derive(Debug, Error)]
pub enum Refused {
    #[error("{0}")]
    Invalid(String),
    #[error("image {0} is not served here")]
    Unknown(String),
    #[error("image {0} is being served")]
    InUse(String),
    #[error("the pool has no room: all that it has is pinned, or its file system needs the space")]
    Full,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// 64 hexadecimal digits.
#[derive(Clone, Deserialize)]
#[serde(try_from = "String")]
pub struct Secret(pub Key);

impl TryFrom<String> for Secret {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        unhex(&text).map(|bytes| Self(Key(bytes))).ok_or("a secret has 64 hexadecimal digits")
    }
}

/// A host that an image is read from. `address`: `HOST:PORT`. `far`: it is in another place.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParentSpec {
    pub host: String,
    pub address: String,
    pub identity: String,
    pub secret: Secret,
    #[serde(default)]
    pub far: bool,
}

/// An image that this host serves. `mark`: what the content is served from, on an origin; another mark is another content.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSpec {
    pub name: String,
    pub key: String,
    pub size: u64,
    pub digest: String,
    #[serde(default)]
    pub mark: Option<String>,
    #[serde(default)]
    pub parents: Vec<ParentSpec>,
}

/// How long one status may count what the pool has: the agent asks every few seconds.
const COUNTING: Duration = Duration::from_millis(100);

/// How a parent is used now.
#[derive(Debug, Serialize)]
pub struct ParentStatus {
    pub host: String,
    pub address: String,
    pub state: Use,
}

/// What an image does now. Bytes; `parents`: in the order of the agent's list.
#[derive(Debug, Serialize)]
#[allow(clippy::struct_excessive_bools)] // what the agent reads
pub struct ImageStatus {
    pub name: String,
    pub key: String,
    pub proven: bool,
    pub fetched: u64,
    pub sent: u64,
    pub hits: u64,
    /// Of its chunks in the pool, which other images may share. Old if there is much to count.
    pub held: u64,
    /// No parent is needed to read all of the image.
    pub whole: bool,
    /// Until when its chunks stay, in seconds since 1970.
    pub pinned: u64,
    /// It is known what programs of this host read first.
    pub boot_set: bool,
    /// Bytes that were filled behind demand, and that are to be filled.
    pub filled: (u64, u64),
    /// Whether that goes on.
    pub filling: bool,
    pub parents: Vec<ParentStatus>,
}

/// Something that the agent should hear of.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    ParentLost { image: String, host: String, why: &'static str },
}

struct Served {
    image: Arc<Image>,
    size: u64,
    digest: String,
    mark: Option<String>,
}

#[derive(Default)]
struct Tables {
    /// By the image's name.
    images: HashMap<String, Served>,
    /// By the image's name. Children may connect before the image is served.
    readers: HashMap<String, Readers>,
}

/// All images of this host.
pub struct Registry {
    pub loops: Arc<Loops>,
    tables: Mutex<Tables>,
    notes: Notes,
    pub pool: Arc<Pool>,
    pub limits: Arc<Limits>,
    events: tokio::sync::broadcast::Sender<Event>,
    /// Changes when another image is served.
    news: watch::Sender<()>,
}

impl Registry {
    /// `manifests`: the folder of the manifests.
    #[must_use]
    pub fn new(manifests: PathBuf, pool: Arc<Pool>, loops: Arc<Loops>) -> Self {
        Self {
            loops,
            tables: Mutex::default(),
            notes: Notes { folder: manifests },
            pool,
            limits: Arc::default(),
            events: tokio::sync::broadcast::channel(1024).0,
            news: watch::Sender::default(),
        }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn events(&self) -> tokio::sync::broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Serves an image, or follows other parents. The same again changes nothing.
    ///
    /// # Errors
    /// The description makes no sense, or a file cannot be opened.
    pub async fn serve(&self, spec: ImageSpec, content: Option<File>) -> Result<(), Refused> {
        check(&spec)?;
        let image = self.image(&spec, content)?;
        image.parents.follow(endpoints(&spec, false)).await;
        if image.proven() {
            image.manifest_parents.follow(endpoints(&spec, true)).await;
        }
        Ok(())
    }

    /// The image that is served already, if it is the same, or a new one in its place.
    fn image(&self, spec: &ImageSpec, content: Option<File>) -> Result<Arc<Image>, Refused> {
        let mut tables = self.tables();
        if let Some(old) = tables.images.get(&spec.name) {
            if old.size == spec.size && old.digest == spec.digest && old.mark == spec.mark {
                return Ok(old.image.clone());
            }
        }
        if spec.mark.is_some() != content.is_some() {
            return Err(Refused::Invalid("content needs a mark, and a mark a file".to_owned()));
        }
        let kept = Kept { key: spec.key.clone(), size: spec.size, digest: spec.digest.clone() };
        let manifest = kept.manifest(&self.notes.folder)?;
        if content.is_none() {
            self.notes.add(&kept)?;
        } else if manifest.as_ref().is_some_and(|manifest| !manifest.is_whole()) {
            return Err(Refused::Invalid(format!("the manifest of image {} is damaged: publish it again", spec.name)));
        }
        let (left, lost) = mpsc::unbounded_channel();
        let shared = Shared { pool: self.pool.clone(), limits: self.limits.clone(), loops: self.loops.clone() };
        let image = Arc::new(Image::new(spec.key.clone(), spec.size, content, manifest, left, shared));
        tokio::spawn(tell(spec.name.clone(), lost, self.events.clone()));
        let served =
            Served { image: image.clone(), size: spec.size, digest: spec.digest.clone(), mark: spec.mark.clone() };
        if let Some(old) = tables.images.insert(spec.name.clone(), served) {
            old.image.closed.cancel(); // its clients connect again, and find the new one
        }
        self.news.send_replace(());
        Ok(image)
    }

    /// Lets these children read an image, and those whose tickets are newer. The others are cut off.
    ///
    /// A closed image stays closed unless `new`: an old list that comes late opens nothing.
    pub fn admit(&self, image: &str, serving: Secret, revision: u64, children: Vec<String>, new: bool) {
        let mut tables = self.tables();
        if new && !tables.readers.contains_key(image) {
            tables.readers.insert(image.to_owned(), Readers::new(serving.0.clone()));
        }
        if let Some(readers) = tables.readers.get_mut(image) {
            readers.hear(serving.0, revision, children);
        }
    }

    /// Lets nobody read an image any more, until `admit` opens it anew. Children are cut off.
    pub fn close(&self, image: &str) {
        self.tables().readers.remove(image);
    }

    /// Ends an image: reads that wait end with an error. What the pool has stays. One that is not there is fine.
    pub fn drop_image(&self, image: &str) {
        let mut tables = self.tables();
        tables.readers.remove(image);
        if let Some(old) = tables.images.remove(image) {
            old.image.closed.cancel();
        }
    }

    /// The key of who says that it is `IMAGE/CHILD/REVISION`, if that child may read.
    #[must_use]
    pub fn key(&self, identity: &str) -> Option<Key> {
        let claim = Claim::parse(identity)?;
        self.tables().readers.get(claim.image)?.key(claim)
    }

    /// What a child that has proven its identity may read, and what cuts it off.
    #[must_use]
    pub fn let_in(self: &Arc<Self>, identity: &str) -> Option<(OfChild, CancellationToken)> {
        let claim = Claim::parse(identity)?;
        let cut = self.tables().readers.get_mut(claim.image)?.let_in(claim)?;
        Some((OfChild { registry: self.clone(), image: claim.image.to_owned() }, cut))
    }

    fn export(&self, image: &str, key: &str) -> Option<Export> {
        let served = self.tables().images.get(image)?.image.clone();
        match key.strip_suffix("/manifest") {
            Some(key) => (key == served.key && served.proven()).then_some(Export::Manifest(served)),
            None => (key == served.key).then_some(Export::Image(served)),
        }
    }

    /// Has ranges of an image kept here, behind demand (`Image::fill`).
    ///
    /// # Errors
    /// The image is not served here, or the pool can keep nothing more.
    pub fn fill(
        &self,
        image: &str,
        ranges: Vec<Range<u64>>,
        class: Class,
        rate: Option<NonZeroU64>,
    ) -> Result<(), Refused> {
        let image = self.served(image)?;
        if !ranges.is_empty() && self.pool.is_full() {
            return Err(Refused::Full);
        }
        image.fill(ranges, class, rate);
        Ok(())
    }

    /// What programs of this host have read of an image first (`BootSet`).
    ///
    /// # Errors
    /// The image is not served here.
    pub fn boot_set(&self, image: &str) -> Result<Option<Vec<Range<u64>>>, Refused> {
        Ok(self.served(image)?.boot_set.complete(Instant::now()))
    }

    /// An image that is served here.
    ///
    /// # Errors
    /// It is not.
    pub fn served(&self, image: &str) -> Result<Arc<Image>, Refused> {
        let tables = self.tables();
        Ok(tables.images.get(image).ok_or_else(|| Refused::Unknown(image.to_owned()))?.image.clone())
    }

    /// Has the chunks of an image stay in the pool until `end`, in seconds since 1970. A time that has passed ends that.
    ///
    /// # Errors
    /// A manifest cannot be read.
    pub fn pin(&self, key: &str, end: u64) -> Result<(), Refused> {
        if (end > now() || self.pool.pins.end(key) > 0) && self.pool.pins.set(key, end) {
            self.pin_kept(key)?;
        }
        self.end_pins();
        Ok(())
    }

    /// Lets chunks go again that only images have whose pins have ended.
    pub fn end_pins(&self) {
        let Some(turn) = self.pool.pins.turn(now()) else { return };
        for key in &turn.keys {
            if let Err(error) = self.pin_kept(key) {
                tracing::warn!(key, %error, "what is kept of a pinned image may go");
            }
        }
        self.pool.unpin(&turn);
    }

    fn pin_kept(&self, key: &str) -> io::Result<()> {
        for name in self.notes.names(key, false)? {
            if let Some(place) = self.pool.find(&name) {
                self.pool.pin(key, place);
            }
        }
        Ok(())
    }

    /// Images of which the pool may have chunks.
    ///
    /// # Errors
    /// The notes cannot be read.
    pub fn kept(&self) -> Result<Vec<Kept>, Refused> {
        Ok(self.notes.all()?)
    }

    /// Bytes of an image's chunks in the pool; only of those that no other image has, if `alone`.
    ///
    /// # Errors
    /// A manifest cannot be read.
    pub fn held(&self, key: &str, alone: bool) -> Result<u64, Refused> {
        let served = || self.tables().images.values().find(|served| served.image.key == key).map(|it| it.image.clone());
        match if alone { None } else { served() } {
            Some(image) => {
                image.count();
                Ok(image.held().0)
            }
            None => Ok(self.notes.held(key, &self.pool, alone)?),
        }
    }

    /// Removes what is kept of an image and of no other. Returns the bytes that are free now.
    ///
    /// # Errors
    /// The image is being served, or a file cannot be read or removed.
    pub fn forget(&self, key: &str) -> Result<u64, Refused> {
        let unused = |tables: &Tables| match tables.images.iter().find(|(_, served)| served.image.key == key) {
            Some((name, _)) => Err(Refused::InUse(name.clone())),
            None => Ok(()),
        };
        unused(&self.tables())?;
        // This takes seconds for large images, and all who connect want the tables. If somebody begins to serve the image
        // meanwhile, its chunks are fetched again.
        let freed = self.notes.names(key, true)?.iter().map(|name| self.pool.forget(name)).sum();
        let tables = self.tables();
        unused(&tables)?;
        self.notes.remove(key)?;
        Ok(freed)
    }

    /// What all images do, or one of them. None if it is not served.
    pub fn status(&self, image: Option<&str>) -> Vec<ImageStatus> {
        let images: Vec<(String, Arc<Image>)> = {
            let tables = self.tables();
            let asked = tables.images.iter().filter(|(name, _)| image.is_none_or(|image| image == *name));
            asked.map(|(name, served)| (name.clone(), served.image.clone())).collect()
        };
        count(&images);
        images.into_iter().map(|(name, image)| status(name, &image, self.pool.pins.end(&image.key))).collect()
    }
}

/// Counts what the pool has of images, those first that were counted longest ago, as far as that is quick.
fn count(images: &[(String, Arc<Image>)]) {
    let begun = Instant::now();
    let mut images: Vec<_> = images.iter().map(|(_, image)| image).collect();
    images.sort_by_cached_key(|image| image.counted());
    images.iter().take_while(|_| begun.elapsed() < COUNTING).for_each(|image| image.count());
}

fn status(name: String, image: &Image, pinned: u64) -> ImageStatus {
    let parents = image.parents.uses().into_iter();
    let (done, of, filling) = image.filled();
    let (held, whole) = image.held();
    ImageStatus {
        name,
        key: image.key.clone(),
        proven: image.proven(),
        fetched: image.fetched.load(Ordering::Relaxed),
        sent: image.sent.load(Ordering::Relaxed),
        hits: image.hits.load(Ordering::Relaxed),
        held,
        whole,
        pinned,
        boot_set: image.boot_set.is_complete(Instant::now()),
        filled: (done, of),
        filling,
        parents: parents
            .map(|(parent, state)| ParentStatus { host: parent.host, address: parent.endpoint.address, state })
            .collect(),
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs())
}

/// Programs of this host may read all images, by key or by name.
impl Exports for Registry {
    /// A VM's disk asks for `IMAGE/KEY`: another image with the same content may have other parents.
    fn find(&self, name: &str) -> Option<Export> {
        if let Some((image, key)) = name.split_once('/').filter(|(_, key)| *key != "manifest") {
            return self.export(image, key).map(|export| match export {
                Export::Image(image) => Export::Disk(image),
                other => other,
            });
        }
        let image = {
            let tables = self.tables();
            let key = name.strip_suffix("/manifest").unwrap_or(name);
            let by_key =
                tables.images.iter().find(|(_, served)| served.image.key == key).map(|(image, _)| image.clone());
            by_key.or_else(|| tables.images.get(name).map(|_| name.to_owned()))?
        };
        self.export(&image, name).or_else(|| Some(Export::Image(self.tables().images.get(&image)?.image.clone())))
    }

    fn names(&self) -> Vec<String> {
        self.tables().images.keys().cloned().collect()
    }

    fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }
}

/// A child may read one image.
pub struct OfChild {
    registry: Arc<Registry>,
    image: String,
}

impl Exports for OfChild {
    fn find(&self, name: &str) -> Option<Export> {
        self.registry.export(&self.image, name)
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn news(&self) -> watch::Receiver<()> {
        self.registry.news()
    }
}

/// Names and keys are parts of paths and identities.
fn check(spec: &ImageSpec) -> Result<(), Refused> {
    let word = |text: &str, more: &str| {
        (1..=128).contains(&text.len()) && text.chars().all(|each| each.is_ascii_alphanumeric() || more.contains(each))
    };
    if !word(&spec.name, "-_") || !word(&spec.key, "") {
        return Err(Refused::Invalid(format!("no name or key of an image: {:?}, {:?}", spec.name, spec.key)));
    }
    if spec.size == 0 || spec.size % 512 != 0 || spec.size > LARGEST {
        return Err(Refused::Invalid(format!("an image has no {} bytes", spec.size)));
    }
    Ok(())
}

fn endpoints(spec: &ImageSpec, manifest: bool) -> Vec<Parent> {
    spec.parents.iter().map(|parent| endpoint(spec, parent, manifest)).collect()
}

fn endpoint(spec: &ImageSpec, parent: &ParentSpec, manifest: bool) -> Parent {
    let layout = Layout { size: spec.size };
    let (export, size) =
        if manifest { (format!("{}/manifest", spec.key), layout.length()) } else { (spec.key.clone(), spec.size) };
    Parent {
        host: parent.host.clone(),
        far: parent.far,
        endpoint: Endpoint {
            address: parent.address.clone(),
            identity: parent.identity.clone(),
            key: parent.secret.0.clone(),
            export,
            size,
        },
    }
}

async fn tell(image: String, mut lost: mpsc::UnboundedReceiver<Left>, events: tokio::sync::broadcast::Sender<Event>) {
    while let Some(Left { host, fault }) = lost.recv().await {
        let why = match fault {
            Fault::Dead => "dead",
            Fault::Hung => "hung",
            Fault::Lying => "lying",
        };
        let _ = events.send(Event::ParentLost { image: image.clone(), host, why }); // nobody may listen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHILD: &str = "image/one/1";

    fn registry() -> Arc<Registry> {
        Arc::new(Registry::new(PathBuf::new(), Arc::default(), Arc::default()))
    }

    fn admit(registry: &Registry, revision: u64, child: &str, new: bool) {
        registry.admit("image", Secret(Key([7; 32])), revision, vec![child.to_owned()], new);
    }

    #[test]
    fn a_list_of_children_opens_a_closed_image_only_if_it_is_new() {
        let registry = registry();
        admit(&registry, 5, "one", false);
        assert!(registry.key(CHILD).is_none());
        admit(&registry, 5, "one", true);
        assert!(registry.key(CHILD).is_some());
        admit(&registry, 6, "another", false);
        assert!(registry.key(CHILD).is_none());
    }

    #[test]
    fn a_new_list_that_is_older_than_the_known_one_changes_nothing() {
        let registry = registry();
        admit(&registry, 5, "one", true);
        admit(&registry, 4, "another", true);
        assert!(registry.key(CHILD).is_some());
    }

    #[test]
    fn a_closed_image_cuts_its_children_off_and_is_opened_by_any_new_list() {
        let registry = registry();
        admit(&registry, 5, "one", true);
        let (_, cut) = registry.let_in(CHILD).unwrap();
        registry.close("image");
        assert!(cut.is_cancelled() && registry.let_in(CHILD).is_none());
        admit(&registry, 6, "one", false);
        assert!(registry.key(CHILD).is_none());
        admit(&registry, 3, "one", true);
        assert!(registry.key(CHILD).is_some());
    }
}
