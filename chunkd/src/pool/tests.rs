//! The pool as a whole, on files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::manifest::{CHUNK, to_usize};

const LIMIT: u64 = 4 << 20;

fn chunk(number: u64) -> (Entry, Vec<u8>) {
    let data = (number + 1).to_le_bytes().repeat(to_usize(CHUNK) / 8);
    let name = Name::of_chunk(&data);
    (Entry { name, content: name }, data)
}

struct Scene {
    folder: TempDir,
    pool: Pool,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { folder: tempfile::tempdir().unwrap(), pool: Pool::default() };
        scene.pool.add(&scene.file(), LIMIT, 0, true).unwrap();
        scene
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("pool")
    }

    /// A process that starts again.
    fn again(&mut self) {
        self.pool = Pool::default();
        self.pool.add(&self.file(), LIMIT, 0, true).unwrap();
    }

    fn keep(&self, number: u64) -> Place {
        let (entry, data) = chunk(number);
        self.pool.keep(&entry, &data).unwrap()
    }

    fn find(&self, number: u64) -> Option<Place> {
        self.pool.find(&chunk(number).0.name)
    }

    fn read(&self, place: Place) -> (Found, Vec<u8>) {
        let mut data = vec![0; to_usize(CHUNK)];
        (self.pool.read(place, 0, &mut data), data)
    }

    fn check(&self, number: u64) -> bool {
        let mut data = vec![0; to_usize(CHUNK)];
        let (entry, wanted) = chunk(number);
        self.pool.check(self.find(number).unwrap(), &entry.name, true, &mut data) && data == wanted
    }

    /// Writes over a chunk behind the back of the pool.
    fn damage(&self, number: u64) {
        let (_, wanted) = chunk(number);
        let file = File::options().read(true).write(true).open(self.file()).unwrap();
        let whole = std::fs::read(self.file()).unwrap();
        let at = whole.chunks(to_usize(CHUNK)).position(|found| found == wanted).unwrap();
        file.write_all_at(b"damaged", at as u64 * CHUNK).unwrap();
    }
}

#[test]
fn what_is_kept_is_read() {
    let scene = Scene::new();
    let places: Vec<Place> = (0..5).map(|number| scene.keep(number)).collect();
    assert_eq!(places, (0..5).map(|number| scene.find(number).unwrap()).collect::<Vec<_>>());
    assert_eq!((Found::Data, chunk(3).1), scene.read(places[3]));
    assert_eq!(5 * CHUNK, scene.pool.usage().0);
    assert_eq!(Some(places[4]), Place::from_word(places[4].to_word()));
    assert_eq!(None, Place::from_word(0));
}

#[test]
fn a_name_that_is_kept_twice_has_one_place() {
    let scene = Scene::new();
    assert_eq!(scene.keep(1), scene.keep(1));
    assert_eq!(CHUNK, scene.pool.usage().0);
}

#[test]
fn many_that_keep_the_same_at_once_take_the_space_of_one() {
    let scene = Scene::new();
    let begin = std::sync::Barrier::new(8);
    for number in 0..20 {
        std::thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    begin.wait();
                    scene.keep(number);
                });
            }
        });
        assert_eq!((Found::Data, chunk(number).1), scene.read(scene.find(number).unwrap()));
    }
    assert_eq!(20 * CHUNK, scene.pool.usage().0);
}

#[test]
fn each_change_of_what_is_kept_is_counted() {
    let scene = Scene::new();
    let mut before = 0;
    let mut changed = || std::mem::replace(&mut before, scene.pool.changes()) != scene.pool.changes();
    assert!(changed()); // a member has come
    scene.keep(1);
    assert!(changed());
    scene.keep(1);
    scene.find(2);
    assert!(!changed());
    scene.pool.forget(&chunk(1).0.name);
    assert!(changed());
    scene.pool.remove(&scene.file());
    assert!(changed());
}

#[test]
fn a_chunk_with_two_names_in_a_list_is_held_once() {
    let scene = Scene::new();
    for number in 0..3 {
        scene.keep(number);
    }
    let names = [1, 2, 1, 7].map(|number| chunk(number).0.name);
    assert_eq!(2 * CHUNK, scene.pool.held(&names));
}

#[test]
fn after_a_restart_a_chunk_is_believed_once_it_was_checked() {
    let mut scene = Scene::new();
    scene.keep(1);
    scene.again();
    let place = scene.find(1).unwrap();
    assert_eq!(Found::Unchecked, scene.read(place).0);
    assert!(scene.check(1));
    assert_eq!((Found::Data, chunk(1).1), scene.read(place));
}

#[test]
fn a_torn_chunk_is_forgotten() {
    let mut scene = Scene::new();
    scene.keep(1);
    scene.keep(2);
    scene.damage(1);
    scene.again();
    assert!(!scene.check(1));
    assert_eq!((None, CHUNK), (scene.find(1), scene.pool.usage().0));
    assert!(scene.check(2));
    scene.keep(1);
    scene.again();
    assert!(scene.check(1) && scene.check(2));
}

#[test]
fn an_unproven_chunk_is_checked_by_what_was_written() {
    let mut scene = Scene::new();
    let (entry, data) = chunk(1);
    let entry = Entry { name: Name::of_place("image", 1), content: entry.content };
    scene.pool.keep(&entry, &data).unwrap();
    scene.again();
    let mut found = vec![0; to_usize(CHUNK)];
    assert!(scene.pool.check(scene.pool.find(&entry.name).unwrap(), &entry.name, false, &mut found) && found == data);
    scene.damage(1);
    scene.again();
    assert!(!scene.pool.check(scene.pool.find(&entry.name).unwrap(), &entry.name, false, &mut found));
}

#[test]
fn what_a_slot_had_before_is_not_taken_for_what_the_disk_lost() {
    let scene = Scene::new();
    scene.keep(1);
    let before = std::fs::read(scene.file()).unwrap();
    let (entry, data) = chunk(2);
    for proven in [true, false] {
        (1..=2).for_each(|number| _ = scene.pool.forget(&chunk(number).0.name));
        let place = scene.keep(2); // in the slot of the first
        File::options().write(true).open(scene.file()).unwrap().write_all_at(&before, 0).unwrap();
        assert!(!scene.pool.check(place, &entry.name, proven, &mut vec![0; data.len()]));
    }
}

#[test]
fn a_full_pool_takes_new_chunks_and_never_grows() {
    let scene = Scene::new();
    let (_, limit) = scene.pool.usage();
    let first = scene.keep(0);
    for number in 1..200 {
        scene.keep(number);
        assert!(scene.pool.usage().0 <= limit);
    }
    assert!(scene.file().metadata().unwrap().len() <= LIMIT);
    assert_eq!((None, Found::Gone), (scene.find(0), scene.read(first).0));
    assert_eq!((Found::Data, chunk(199).1), scene.read(scene.find(199).unwrap()));
}

#[test]
fn what_is_read_again_and_again_stays_in_a_full_pool() {
    let scene = Scene::new();
    let hot = scene.keep(0);
    for number in 1..500 {
        scene.keep(number);
        assert_eq!(Found::Data, scene.read(hot).0);
    }
}

#[test]
fn a_member_of_another_process_is_left_alone() {
    let scene = Scene::new();
    assert!(Pool::default().add(&scene.file(), LIMIT, 0, true).unwrap_err().to_string().contains("another process"));
    assert!(scene.pool.remove(&scene.file()));
    scene.pool.add(&scene.file(), LIMIT, 0, true).unwrap();
}

#[test]
fn a_member_that_is_removed_has_no_file_open() {
    let scene = Scene::new();
    scene.keep(1);
    let opened = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap();
        fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()).any(|path| path == scene.file())
    };
    assert!(opened() && scene.pool.remove(&scene.file()) && !opened());
}

#[test]
fn a_member_gets_another_limit_and_reserve() {
    let scene = Scene::new();
    scene.keep(1);
    scene.pool.add(&scene.file(), LIMIT / 2, 0, true).unwrap();
    assert!(scene.pool.usage().1 < LIMIT / 2 && scene.check(1));
    scene.pool.add(&scene.file(), LIMIT / 2, u64::MAX / 2, true).unwrap();
    assert_eq!(CHUNK, scene.pool.shrink());
}

#[test]
fn a_file_that_somebody_cuts_off_loses_chunks_and_serves_no_zeros() {
    let scene = Scene::new();
    let places: Vec<Place> = (0..8).map(|number| scene.keep(number)).collect();
    File::options().write(true).open(scene.file()).unwrap().set_len(5 * CHUNK).unwrap();
    assert_eq!(Found::Gone, scene.read(places[7]).0);
    let (entry, data) = chunk(100);
    assert_eq!(None, scene.pool.keep(&entry, &data)); // which notices it
    assert_eq!(Found::Unchecked, scene.read(places[7]).0);
    assert!(!scene.check(7) && scene.check(0));
    scene.keep(100);
    assert_eq!(Found::Data, scene.read(scene.find(100).unwrap()).0);
}

#[test]
fn what_somebody_else_has_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, b"an ext4 file system, say, of somebody else").unwrap();
    assert!(Pool::default().add(&path, LIMIT, 0, true).is_err());
    assert_eq!(b"an ext4", &std::fs::read(&path).unwrap()[..7]);
    assert!(Pool::default().add(&folder.path().join("small"), CHUNK, 0, true).is_err());
}

#[test]
fn a_file_that_is_not_there_is_made_only_if_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    assert!(Pool::default().add(&path, LIMIT, 0, false).is_err() && !path.exists());
    Pool::default().add(&path, LIMIT, 0, true).unwrap();
    Pool::default().add(&path, LIMIT, 0, false).unwrap();
}

#[test]
fn a_forgotten_chunk_gives_its_space_back() {
    use std::os::unix::fs::MetadataExt;
    let mut scene = Scene::new();
    for number in 0..8 {
        scene.keep(number);
    }
    let before = scene.file().metadata().unwrap().blocks();
    assert_eq!((CHUNK, 0), (scene.pool.forget(&chunk(3).0.name), scene.pool.forget(&chunk(3).0.name)));
    assert_eq!(CHUNK / 512, before - scene.file().metadata().unwrap().blocks());
    scene.again();
    assert_eq!((None, 7 * CHUNK), (scene.find(3), scene.pool.usage().0));
}

#[test]
fn no_chunk_goes_to_the_reserve_of_the_file_system() {
    let scene = Scene { folder: tempfile::tempdir().unwrap(), pool: Pool::default() };
    scene.pool.add(&scene.file(), LIMIT, u64::MAX / 2, true).unwrap();
    let (entry, data) = chunk(1);
    assert_eq!(None, scene.pool.keep(&entry, &data));
}

#[test]
fn a_pool_gives_space_back_until_the_reserve_is_free_and_keeps_the_rest() {
    let free = |scene: &Scene| {
        let stat = rustix::fs::statvfs(scene.folder.path()).unwrap();
        stat.f_bavail * stat.f_frsize
    };
    let scene = Scene::new();
    let first = scene.keep(0);
    (1..9).for_each(|number| _ = scene.keep(number));
    scene.pool.add(&scene.file(), LIMIT, free(&scene) / 2, true).unwrap();
    assert_eq!((0, Found::Data), (scene.pool.shrink(), scene.read(first).0)); // others use this file system, too
    scene.pool.add(&scene.file(), LIMIT, free(&scene) * 2, true).unwrap();
    assert_eq!((9 * CHUNK, 0), (scene.pool.shrink(), scene.pool.usage().0));
}

#[test]
fn members_share_the_chunks_and_one_that_is_removed_is_read_no_more() {
    let scene = Scene::new();
    let second = scene.folder.path().join("second");
    scene.pool.add(&second, LIMIT, 0, true).unwrap();
    scene.pool.add(&second, LIMIT, 0, true).unwrap();
    let places: Vec<Place> = (0..20).map(|number| scene.keep(number)).collect();
    assert!(scene.pool.remove(&second) && !scene.pool.remove(&second));
    let left = places.iter().filter(|&&place| scene.read(place).0 == Found::Data).count();
    assert_eq!(10, left);
    assert_eq!(10 * CHUNK, scene.pool.usage().0);
    scene.keep(19);
}

#[test]
fn a_reader_never_gets_the_bytes_of_another_chunk() {
    let scene = Scene::new();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                let mut data = vec![0; to_usize(CHUNK)];
                while !done.load(Ordering::Relaxed) {
                    for number in 0..100 {
                        let Some(place) = scene.find(number) else { continue };
                        if scene.pool.read(place, 0, &mut data) == Found::Data {
                            assert!(data[..8] == (number + 1).to_le_bytes());
                        }
                    }
                }
            });
        }
        for number in 0..5000 {
            scene.keep(number % 100);
        }
        done.store(true, Ordering::Relaxed);
    });
}

fn keep_all(scene: &Scene, numbers: std::ops::Range<u64>) {
    for number in numbers {
        scene.keep(number);
    }
}

/// Chunks of these numbers, kept and pinned by the image with this key.
fn keep_pinned(scene: &Scene, key: &str, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let place = scene.keep(number);
        scene.pool.pin(key, place);
    }
}

fn found(scene: &Scene, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|&number| scene.find(number).is_some()).count()
}

#[test]
fn pinned_chunks_stay_in_a_full_pool() {
    let scene = Scene::new();
    scene.pool.pins.set("image", 10);
    keep_pinned(&scene, "image", 0..8);
    keep_pinned(&scene, "another", 8..16); // which is not pinned
    keep_all(&scene, 16..300);
    assert_eq!((8, 0), (found(&scene, 0..8), found(&scene, 8..16)));
}

#[test]
fn what_two_images_share_stays_until_both_pins_have_ended() {
    let scene = Scene::new();
    scene.pool.pins.set("image", 10);
    scene.pool.pins.set("another", 20);
    keep_pinned(&scene, "image", 0..8);
    keep_pinned(&scene, "another", 4..8);
    assert!(scene.pool.pins.turn(9).is_none());
    let turn = scene.pool.pins.turn(10).unwrap();
    assert_eq!(vec!["another"; 1], turn.keys);
    keep_pinned(&scene, "another", 4..8);
    scene.pool.unpin(&turn);
    drop(turn);
    keep_all(&scene, 100..300);
    assert_eq!((0, 4), (found(&scene, 0..4), found(&scene, 4..8)));
    scene.pool.unpin(&scene.pool.pins.turn(20).unwrap());
    keep_all(&scene, 300..500);
    assert_eq!(0, found(&scene, 4..8));
}

#[test]
fn a_pool_full_of_pinned_chunks_keeps_no_further_ones() {
    let scene = Scene::new();
    scene.pool.pins.set("image", 10);
    let slots = scene.pool.usage().1 / CHUNK;
    keep_pinned(&scene, "image", 0..slots);
    let (entry, data) = chunk(slots);
    assert_eq!((None, true), (scene.pool.keep(&entry, &data), scene.pool.is_full()));
    scene.pool.forget(&chunk(0).0.name);
    assert!(!scene.pool.is_full());
    keep_pinned(&scene, "image", slots..slots + 1);
    assert_eq!((None, true), (scene.find(0), scene.pool.is_full()));
}

/// What a power cut may leave of a file of which nothing was synced: each block as any of the writes until then left it.
fn cut(versions: &[Vec<u8>], mut random: impl FnMut(usize) -> usize) -> Vec<u8> {
    const BLOCK: usize = 4096;
    let until = 1 + random(versions.len());
    let mut left = versions[0].clone();
    for (number, block) in left.chunks_mut(BLOCK).enumerate() {
        block.copy_from_slice(&versions[random(until)][number * BLOCK..][..block.len()]);
    }
    left
}

/// A thousand power cuts with WHOLE set.
#[test]
fn after_a_power_cut_chunks_are_right_or_gone() {
    const CHUNKS: u64 = 200; // more than there is room for
    let scene = Scene::new();
    let mut versions = vec![std::fs::read(scene.file()).unwrap()];
    for number in 0..CHUNKS {
        scene.keep(number);
        if number % 8 == 0 {
            versions.push(std::fs::read(scene.file()).unwrap());
        }
    }
    let mut noise = blake3::Hasher::new().update(b"cuts").finalize_xof();
    let mut random = |below: usize| {
        let mut bytes = [0; 4];
        noise.fill(&mut bytes);
        u32::from_le_bytes(bytes) as usize % below
    };
    let (mut right, mut torn) = (0, 0);
    for round in 0..if std::env::var_os("WHOLE").is_some() { 1000 } else { 20 } {
        let file = scene.folder.path().join(format!("cut-{round}"));
        std::fs::write(&file, cut(&versions, &mut random)).unwrap();
        let pool = Pool::default();
        pool.add(&file, LIMIT, 0, false).unwrap();
        for (entry, wanted) in (0..CHUNKS).map(chunk) {
            let Some(place) = pool.find(&entry.name) else { continue };
            let mut data = vec![0; wanted.len()];
            if pool.check(place, &entry.name, round % 2 == 0, &mut data) {
                assert!(data == wanted, "round {round}: a wrong chunk is served");
                right += 1;
            } else {
                torn += 1;
            }
        }
        std::fs::remove_file(file).unwrap();
    }
    assert!(right > 0 && torn > 0, "right {right}, torn {torn}");
}
