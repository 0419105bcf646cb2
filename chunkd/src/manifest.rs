//! The list of an image's chunks, and how a host knows that the list is right.
//!
//! An image is a list of chunks of 64 KiB. Each chunk is named by its BLAKE3 hash; the last one is filled up with zeros. The
//! manifest is the list of these names in pages of 4096. A page is named by its hash. The image's digest is the hash of
//! its size and the names of its pages. So a digest proves the list of pages, the list a page, and a page a chunk.
//!
//! A chunk of zeros has the name of 32 zero bytes: nobody stores or fetches it, and a sparse image has a sparse manifest.
//!
//! The file of a manifest, and the export of it, hold the list of pages, zeros up to a multiple of 4096 bytes, the pages one
//! after the other, and zeros up to a multiple of 512 bytes.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use thiserror::Error;

/// Bytes of a chunk.
pub const CHUNK: u64 = 64 << 10;

/// Names in a page.
pub const PAGE: u32 = 4096;

/// Bytes of a name.
pub const NAME: usize = 32;

const PAGE_BYTES: u64 = PAGE as u64 * NAME as u64;
const ALIGNMENT: u64 = 4096;
const SECTOR: u64 = 512;

/// The largest image: its chunks can be counted with 32 bits, and its list of pages has 4 MiB.
pub const LARGEST: u64 = 32 << 40;

/// What is not as its name says.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0} does not match its name")]
pub struct Wrong(pub String);

/// The name of a chunk or of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name(pub [u8; NAME]);

impl Name {
    /// The name of a chunk of zeros.
    pub const ZEROS: Self = Self([0; NAME]);

    /// The name of a whole chunk.
    #[must_use]
    pub fn of_chunk(chunk: &[u8]) -> Self {
        if is_zero(chunk) { Self::ZEROS } else { Self(blake3::hash(chunk).into()) }
    }

    /// The name of a chunk of an image whose content nobody has read as a whole: no other image has it.
    #[must_use]
    pub fn of_place(image: &str, chunk: u32) -> Self {
        let mut hash = blake3::Hasher::new_derive_key("virtman 2026-11 a chunk of an unverified image");
        hash.update(&chunk.to_le_bytes());
        hash.update(image.as_bytes());
        Self(hash.finalize().into())
    }

    #[must_use]
    pub fn of_page(page: &[u8]) -> Self {
        Self(blake3::hash(page).into())
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", blake3::Hash::from(self.0).to_hex())
    }
}

pub(crate) fn is_zero(data: &[u8]) -> bool {
    data.chunks(64).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

/// The chunk that a byte of an image is in.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // LARGEST
pub fn chunk_of(offset: u64) -> u32 {
    (offset / CHUNK) as u32
}

/// A length in memory.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // lib.rs: only for 64 bits
pub fn to_usize(length: u64) -> usize {
    length as usize
}

/// The bytes of 64 hexadecimal digits.
#[must_use]
pub fn unhex(text: &str) -> Option<[u8; 32]> {
    Some(blake3::Hash::from_hex(text).ok()?.into())
}

/// The digest of an image of `size` bytes whose pages have these names.
#[must_use]
pub fn digest(size: u64, pages: &[u8]) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    hash.update(&size.to_le_bytes());
    hash.update(pages);
    hash.finalize().into()
}

/// Where what is in the manifest of an image of `size` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub size: u64,
}

impl Layout {
    /// The chunks of the image.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // LARGEST
    pub fn chunks(self) -> u32 {
        self.size.div_ceil(CHUNK) as u32
    }

    #[must_use]
    pub fn pages(self) -> u32 {
        self.chunks().div_ceil(PAGE)
    }

    /// Bytes of the list of pages.
    #[must_use]
    pub fn list(self) -> u64 {
        u64::from(self.pages()) * NAME as u64
    }

    /// Where the first page begins.
    fn begin(self) -> u64 {
        self.list().next_multiple_of(ALIGNMENT)
    }

    /// Where a page is: its first byte, and its bytes.
    #[must_use]
    pub fn page(self, page: u32) -> (u64, u64) {
        let names = (self.chunks() - page * PAGE).min(PAGE);
        (self.begin() + u64::from(page) * PAGE_BYTES, u64::from(names) * NAME as u64)
    }

    /// Bytes of the whole manifest.
    #[must_use]
    pub fn length(self) -> u64 {
        (self.begin() + u64::from(self.chunks()) * NAME as u64).next_multiple_of(SECTOR)
    }
}

/// Pages in memory: random reads of a large image would have one of many pages checked for each chunk.
const IN_MEMORY: usize = 2;

/// The manifest of one image on this host: what is known of it is in a file, and nothing of that is believed unchecked.
#[derive(Debug)]
pub struct Manifest {
    pub layout: Layout,
    digest: [u8; 32],
    file: File,
    list: OnceLock<Box<[u8]>>,
    /// Whether a page in the file was right when it was read last.
    known: Box<[AtomicBool]>,
    /// The pages of which a name was wanted last, the latest at the end.
    recent: Mutex<VecDeque<(u32, Arc<[u8]>)>>,
    /// Pages that the disk has not taken.
    unkept: Mutex<HashMap<u32, Arc<[u8]>>>,
}

impl Manifest {
    /// Opens the file, which is made if there is none.
    ///
    /// # Errors
    /// The file cannot be made, opened or read.
    pub fn open(path: &Path, digest: [u8; 32], size: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let layout = Layout { size };
        if file.metadata()?.len() != layout.length() {
            file.set_len(layout.length())?;
        }
        let known = (0..layout.pages()).map(|_| AtomicBool::new(false)).collect();
        let mut list = vec![0; to_usize(layout.list())];
        file.read_exact_at(&mut list, 0)?;
        let (recent, unkept) = (Mutex::default(), Mutex::default());
        let manifest = Self { layout, digest, file, list: OnceLock::new(), known, recent, unkept };
        let _ = manifest.put_list(&list, false);
        Ok(manifest)
    }

    /// Whether the list of pages is known.
    #[must_use]
    pub fn has_list(&self) -> bool {
        self.list.get().is_some()
    }

    /// The list of pages. `keep`: write it to the file.
    ///
    /// # Errors
    /// This is not the list of the image's digest.
    pub fn put_list(&self, list: &[u8], keep: bool) -> Result<(), Wrong> {
        if digest(self.layout.size, list) != self.digest {
            return Err(Wrong("the list of pages".to_owned()));
        }
        if keep {
            if let Err(error) = self.file.write_all_at(list, 0) {
                tracing::warn!(%error, "the list of pages is not kept");
            }
        }
        let _ = self.list.set(list.into());
        Ok(())
    }

    fn unkept(&self) -> MutexGuard<'_, HashMap<u32, Arc<[u8]>>> {
        self.unkept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recent(&self) -> MutexGuard<'_, VecDeque<(u32, Arc<[u8]>)>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a page is here.
    #[must_use]
    pub fn has_page(&self, page: u32) -> bool {
        self.known.get(page as usize).is_some_and(|known| known.load(Ordering::Acquire)) || self.page(page).is_some()
    }

    /// A page, compared with its name: the disk may have lost what it was given.
    fn page(&self, page: u32) -> Option<Arc<[u8]>> {
        let known = self.known.get(page as usize)?;
        if let Some(data) = self.unkept().get(&page) {
            return Some(data.clone());
        }
        let (offset, length) = self.layout.page(page);
        let mut data = vec![0; to_usize(length)];
        let right = self.file.read_exact_at(&mut data, offset).is_ok() && self.is_page(page, &data);
        if known.swap(right, Ordering::AcqRel) && !right {
            tracing::warn!(page, "a page of a manifest is damaged; it is fetched anew");
        }
        right.then(|| data.into())
    }

    /// Whether all pages are here, and right.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        (0..self.layout.pages()).all(|page| self.has_page(page))
    }

    /// A page, to be kept: in memory if the disk does not take it.
    ///
    /// # Errors
    /// The list of pages names another one.
    pub fn put_page(&self, page: u32, data: &[u8]) -> Result<(), Wrong> {
        if !self.is_page(page, data) {
            return Err(Wrong(format!("page {page}")));
        }
        match self.file.write_all_at(data, self.layout.page(page).0) {
            Ok(()) => self.known[page as usize].store(true, Ordering::Release),
            Err(error) => {
                tracing::warn!(%error, page, "a page is not kept");
                self.unkept().insert(page, data.into());
            }
        }
        Ok(())
    }

    fn is_page(&self, page: u32, data: &[u8]) -> bool {
        let at = page as usize * NAME;
        let wanted = self.list.get().and_then(|list| list.get(at..at + NAME));
        wanted.is_some_and(|wanted| wanted == Name::of_page(data).0)
    }

    /// The name of a chunk, if its page is here.
    #[must_use]
    pub fn name(&self, chunk: u32) -> Option<Name> {
        let page = chunk / PAGE;
        let mut recent = self.recent();
        let at = recent.iter().position(|(known, _)| *known == page);
        let (_, data) = match at.and_then(|at| recent.remove(at)) {
            Some(found) => found,
            None => (page, self.page(page)?),
        };
        let name = data.get((chunk % PAGE) as usize * NAME..)?.first_chunk().map(|&name| Name(name));
        recent.push_back((page, data));
        if recent.len() > IN_MEMORY {
            recent.pop_front();
        }
        name
    }

    /// The names of all chunks whose pages are here.
    #[must_use]
    pub fn names(&self) -> Vec<Name> {
        let mut names = Vec::new();
        for page in (0..self.layout.pages()).filter_map(|page| self.page(page)) {
            names.extend(page.chunks_exact(NAME).filter_map(|name| name.first_chunk()).map(|&name| Name(name)));
        }
        names
    }

    /// How many pages are known to be here.
    #[must_use]
    pub fn known(&self) -> usize {
        self.known.iter().filter(|known| known.load(Ordering::Acquire)).count() + self.unkept().len()
    }

    /// A range of the manifest as its export shows it, in bytes. None if the list or a page is not here.
    #[must_use]
    pub fn read(&self, offset: u64, length: u64) -> Option<Vec<u8>> {
        let mut data = vec![0; to_usize(length)];
        let mut put = |begin: u64, part: &[u8]| {
            let (from, to) = (begin.max(offset), (begin + part.len() as u64).min(offset + length));
            if from < to {
                data[to_usize(from - offset)..to_usize(to - offset)]
                    .copy_from_slice(&part[to_usize(from - begin)..to_usize(to - begin)]);
            }
        };
        put(0, self.list.get()?);
        for page in self.pages_of(offset, length) {
            put(self.layout.page(page).0, &self.page(page)?);
        }
        Some(data)
    }

    /// The pages that a range of the manifest touches.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // LARGEST
    pub fn pages_of(&self, offset: u64, length: u64) -> std::ops::Range<u32> {
        let begin = self.layout.begin();
        let first = offset.saturating_sub(begin) / PAGE_BYTES;
        let end = (offset + length).saturating_sub(begin).div_ceil(PAGE_BYTES);
        first as u32..(end as u32).min(self.layout.pages())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = (4097 * CHUNK) - 512;

    /// The names of an image of `SIZE` bytes with a chunk of zeros, and its manifest's digest, list and pages.
    fn example() -> ([u8; 32], Vec<u8>, Vec<Vec<u8>>) {
        let names: Vec<[u8; NAME]> = (0..4097u32)
            .map(|chunk| if chunk == 7 { Name::ZEROS.0 } else { Name::of_chunk(&chunk.to_le_bytes()).0 })
            .collect();
        let pages: Vec<Vec<u8>> = names.chunks(PAGE as usize).map(<[_]>::concat).collect();
        let list: Vec<u8> = pages.iter().flat_map(|page| Name::of_page(page).0).collect();
        (digest(SIZE, &list), list, pages)
    }

    fn opened(folder: &Path) -> Manifest {
        Manifest::open(&folder.join("m"), example().0, SIZE).unwrap()
    }

    #[test]
    fn the_layout_has_all_chunks() {
        let layout = Layout { size: SIZE };
        assert_eq!((4097, 2, 64), (layout.chunks(), layout.pages(), layout.list()));
        assert_eq!([(4096, 131_072), (135_168, 32)], [layout.page(0), layout.page(1)]);
        assert_eq!(135_680, layout.length());
        assert_eq!(4096 + 512, Layout { size: 512 }.length());
    }

    #[test]
    fn a_chunk_of_zeros_has_a_name_of_its_own() {
        assert_eq!(Name::ZEROS, Name::of_chunk(&vec![0; to_usize(CHUNK)]));
        let mut almost = vec![0; to_usize(CHUNK)];
        almost[to_usize(CHUNK) - 1] = 1;
        assert_ne!(Name::ZEROS, Name::of_chunk(&almost));
    }

    #[test]
    fn what_is_proven_is_kept_and_nothing_else_is_believed() {
        let folder = tempfile::tempdir().unwrap();
        let (_, list, pages) = example();
        let manifest = opened(folder.path());
        assert!(!manifest.has_list() && !manifest.has_page(0));
        assert_eq!(Err(Wrong("the list of pages".to_owned())), manifest.put_list(&list[..32], true));
        manifest.put_list(&list, true).unwrap();
        assert_eq!(Err(Wrong("page 1".to_owned())), manifest.put_page(1, &pages[0]));
        manifest.put_page(0, &pages[0]).unwrap();
        assert_eq!((Some(Name::ZEROS), None), (manifest.name(7), manifest.name(4096)));
        assert_eq!(
            (pages[0].clone(), 1),
            (manifest.names().iter().flat_map(|name| name.0).collect(), manifest.known())
        );
        let again = opened(folder.path());
        assert!(again.has_page(0) && !again.has_page(1));
        assert_eq!(manifest.name(8), again.name(8));
    }

    #[test]
    fn a_damaged_page_is_fetched_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (_, list, pages) = example();
        let manifest = opened(folder.path());
        manifest.put_list(&list, true).unwrap();
        manifest.put_page(0, &pages[0]).unwrap();
        manifest.file.write_all_at(&[1], 5000).unwrap();
        assert!(!opened(folder.path()).has_page(0));
        assert_eq!((None, None, false), (manifest.name(8), manifest.read(0, 8192), manifest.has_page(0)));
        manifest.put_page(0, &pages[0]).unwrap();
        assert_eq!(pages[0][8 * NAME..9 * NAME], manifest.name(8).unwrap().0);
    }

    #[test]
    fn a_file_that_was_cut_off_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let (_, list, pages) = example();
        let manifest = opened(folder.path());
        manifest.put_list(&list, true).unwrap();
        manifest.put_page(0, &pages[0]).unwrap();
        manifest.file.set_len(4096).unwrap();
        assert_eq!(None, manifest.name(100));
        assert!(!manifest.has_page(0));
    }

    #[test]
    fn a_page_that_the_disk_does_not_take_is_read_from_memory() {
        let folder = tempfile::tempdir().unwrap();
        let (_, list, pages) = example();
        let mut manifest = opened(folder.path());
        manifest.put_list(&list, true).unwrap();
        manifest.file = File::open(folder.path().join("m")).unwrap(); // which cannot be written
        manifest.put_page(1, &pages[1]).unwrap();
        assert_eq!(pages[1], manifest.name(4096).unwrap().0);
        assert_eq!(pages[1][1..], manifest.read(135_169, 31).unwrap());
        assert!(!opened(folder.path()).has_page(1));
    }

    #[test]
    fn ranges_touch_the_pages_that_they_are_in() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = opened(folder.path());
        assert_eq!(0..0, manifest.pages_of(0, 4096));
        assert_eq!(0..1, manifest.pages_of(0, 4097));
        assert_eq!(0..2, manifest.pages_of(4096 + 131_071, 2));
        assert_eq!(1..2, manifest.pages_of(135_168, 512));
    }

    /// `tests/unit/drivers/test_manifest.py` has the same.
    #[test]
    fn the_digest_is_that_of_other_languages() {
        let (digest, _, _) = example();
        assert_eq!(
            "3d6e4ea0ba9573576987f60647192390ef392fd1ee7c9064697bd5fdaeae4b6f",
            blake3::Hash::from(digest).to_hex().as_str()
        );
    }
}
