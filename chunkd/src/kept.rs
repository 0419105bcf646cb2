//! What the pool has of each image, also of images that are not served now.
//!
//! A note beside each manifest has the image's size and digest, so that the names of the image's chunks are known.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::manifest::{Layout, Manifest, Name, unhex};
use crate::pool::Pool;

/// The digests of images with a manifest begin so.
pub const PROVEN: &str = "blake3-64k:";

const NOTE: &str = "json";

/// An image of which the pool may have chunks. `size` in bytes.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Kept {
    #[serde(skip)]
    pub key: String,
    pub size: u64,
    pub digest: String,
}

impl Kept {
    /// The image's manifest; none if its digest proves nothing.
    ///
    /// # Errors
    /// The digest makes no sense, or the file cannot be opened.
    pub fn manifest(&self, folder: &Path) -> io::Result<Option<Manifest>> {
        let Some(hash) = self.digest.strip_prefix(PROVEN) else { return Ok(None) };
        let hash = unhex(hash).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no digest"))?;
        Manifest::open(&folder.join(&self.key), hash, self.size).map(Some)
    }

    /// The names of its chunks, as far as they are known here.
    fn names(&self, folder: &Path) -> io::Result<Vec<Name>> {
        Ok(names(&self.key, self.size, self.manifest(folder)?.as_ref()))
    }
}

/// The names of an image's chunks that are not zeros, as far as they are known.
#[must_use]
pub fn names(key: &str, size: u64, manifest: Option<&Manifest>) -> Vec<Name> {
    match manifest {
        Some(manifest) => manifest.names().into_iter().filter(|name| *name != Name::ZEROS).collect(),
        None => (0..Layout { size }.chunks()).map(|chunk| Name::of_place(key, chunk)).collect(),
    }
}

/// The notes of images in a folder.
#[derive(Debug)]
pub struct Notes {
    pub folder: PathBuf,
}

impl Notes {
    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.{NOTE}"))
    }

    /// Writes an image down before the pool gets chunks of it.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn add(&self, kept: &Kept) -> io::Result<()> {
        if self.get(&kept.key)?.as_ref() == Some(kept) {
            return Ok(());
        }
        let fresh = self.folder.join(format!(".{}", kept.key));
        let mut file = File::create(&fresh)?;
        file.write_all(&serde_json::to_vec(kept)?)?;
        file.sync_all()?; // after a power cut there is the note, or none
        fs::rename(fresh, self.path(&kept.key))
    }

    /// The note of an image; none if nothing is written there that can be understood.
    fn get(&self, key: &str) -> io::Result<Option<Kept>> {
        let text = match fs::read(self.path(key)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        match serde_json::from_slice(&text) {
            Ok(kept) => Ok(Some(Kept { key: key.to_owned(), ..kept })),
            Err(error) => {
                tracing::warn!(key, %error, "a note is not understood");
                Ok(None)
            }
        }
    }

    /// All images that were written down.
    ///
    /// # Errors
    /// The folder, or a note, cannot be read.
    pub fn all(&self) -> io::Result<Vec<Kept>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let key = path.file_stem().and_then(|stem| stem.to_str());
            if let (Some(key), true) = (key, path.extension().is_some_and(|kind| kind == NOTE)) {
                found.extend(self.get(key)?);
            }
        }
        Ok(found)
    }

    /// Bytes of an image's chunks in the pool; only of those that no other image has, if `alone`.
    ///
    /// # Errors
    /// A manifest cannot be read.
    pub fn held(&self, key: &str, pool: &Pool, alone: bool) -> io::Result<u64> {
        let names: Vec<Name> = self.names(key, alone)?.into_iter().collect();
        Ok(pool.held(&names))
    }

    /// Removes an image's manifest and note.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove(&self, key: &str) -> io::Result<()> {
        for path in [self.folder.join(key), self.path(key)] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The names of an image's chunks, as far as they are known here; only of those that no other image has, if `alone`.
    ///
    /// # Errors
    /// A manifest cannot be read.
    pub fn names(&self, key: &str, alone: bool) -> io::Result<HashSet<Name>> {
        let Some(kept) = self.get(key)? else { return Ok(HashSet::new()) };
        let mut names: HashSet<Name> = kept.names(&self.folder)?.into_iter().collect();
        if alone {
            for other in self.all()?.iter().filter(|other| other.key != key) {
                for name in other.names(&self.folder)? {
                    names.remove(&name);
                }
            }
        }
        Ok(names)
    }
}
