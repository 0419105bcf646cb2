//! Ranges of images that an agent gets in files and pipes.

mod common;

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use chunkd::image::Image;
use chunkd::manifest::{CHUNK, to_usize};
use common::{Content, Host, IMAGE};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

const MIB: u32 = 1 << 20;

/// An origin, and a host that reads from it.
async fn child_of(content: &Content) -> (Host, Host) {
    let (origin, host) = (Host::new("origin").await, Host::new("one").await);
    origin.publish(content).await;
    origin.admit(&["one"]);
    host.attach(content, &[origin.as_parent_of("one")]).await;
    (origin, host)
}

fn image_of(host: &Host) -> Arc<Image> {
    host.registry.served(IMAGE).unwrap()
}

fn get(host: &Host, ranges: Vec<Range<u64>>, to: File) -> JoinHandle<io::Result<()>> {
    let (image, runtime) = (image_of(host), Handle::current());
    spawn_blocking(move || runtime.block_on(image.get(&ranges, to)))
}

async fn in_time<T>(act: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(60), act).await.expect("in time")
}

/// A pipe whose writer blocks, as that of an agent.
fn pipe() -> (File, pipe::Receiver) {
    let (writer, reader) = pipe::pipe().unwrap();
    (writer.into_blocking_fd().unwrap().into(), reader)
}

fn joined(content: &Content, ranges: &[Range<u64>]) -> Vec<u8> {
    ranges.iter().flat_map(|range| &content.data[to_usize(range.start)..to_usize(range.end)]).copied().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranges_follow_each_other_in_a_pipe_wherever_they_come_from() {
    let content = Content::new(9 * MIB + 1536);
    let (origin, host) = child_of(&content).await;
    let size = content.data.len() as u64;
    let ranges = vec![5..70_000, size - 1000..size, 0..size, 2 * CHUNK..3 * CHUNK, 1..2];
    for from in [&host, &host, &origin] {
        let (writer, mut reader) = pipe();
        let got = get(from, ranges.clone(), writer);
        let mut data = Vec::new();
        in_time(reader.read_to_end(&mut data)).await.unwrap();
        in_time(got).await.unwrap().unwrap();
        assert!(joined(&content, &ranges) == data, "{}", from.name);
    }
    assert_eq!(size - 2 * CHUNK, host.fetched());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_written_from_where_it_is_and_its_zeros_are_a_hole_where_nothing_was() {
    let content = Content::of([vec![7; 1 << 20], vec![0; 8 << 20]].concat());
    let (_origin, host) = child_of(&content).await;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[1; 1].repeat(3 << 20)).unwrap();
    file.seek(io::SeekFrom::Start(1)).unwrap();
    in_time(get(&host, vec![0..9 << 20; 2], file.try_clone().unwrap())).await.unwrap().unwrap();
    assert_eq!(1 + (18 << 20), file.stream_position().unwrap());
    let known = file.metadata().unwrap();
    assert!(known.blocks() * 512 < 6 << 20, "{known:?}");
    file.rewind().unwrap();
    let mut data = Vec::new();
    file.read_to_end(&mut data).unwrap();
    assert!([&[1][..], &content.data, &content.data].concat() == data);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_goes_away_ends_it_whether_there_is_something_to_write_or_not() {
    let content = Content::new(MIB);
    let (origin, lonely) = (Host::new("origin").await, Host::new("lonely").await);
    origin.publish(&content).await;
    lonely.attach(&content, &[]).await;
    for host in [&origin, &lonely] {
        let (writer, reader) = pipe();
        let got = get(host, vec![0..1 << 20; 1], writer);
        sleep(Duration::from_millis(200)).await;
        assert!(!got.is_finished(), "{}", host.name);
        drop(reader);
        let error = in_time(got).await.unwrap().unwrap_err();
        assert_eq!(io::ErrorKind::BrokenPipe, error.kind(), "{}", host.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_is_dropped_ends_it_also_while_nobody_reads_the_pipe() {
    let content = Content::new(MIB);
    let (origin, lonely) = (Host::new("origin").await, Host::new("lonely").await);
    origin.publish(&content).await;
    lonely.attach(&content, &[]).await;
    for host in [&origin, &lonely] {
        let (writer, _reader) = pipe();
        let got = get(host, vec![0..1 << 20; 1], writer);
        sleep(Duration::from_millis(200)).await;
        assert!(!got.is_finished(), "{}", host.name);
        host.registry.drop_image(IMAGE);
        assert!(in_time(got).await.unwrap().is_err(), "{}", host.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_is_dropped_ends_it_also_where_nothing_waits() {
    let content = Content::new(MIB);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    let got = get(&origin, vec![0..1 << 20; 1 << 20], File::options().write(true).open("/dev/null").unwrap());
    sleep(Duration::from_millis(200)).await;
    origin.registry.drop_image(IMAGE);
    assert!(in_time(got).await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranges_that_are_empty_or_not_of_the_image_are_refused_and_nothing_is_written() {
    let content = Content::new(MIB);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    let file = tempfile::tempfile().unwrap();
    for bad in [0..0, Range { start: 2, end: 1 }, 0..(1 << 20) + 1, 1 << 20..u64::MAX] {
        let error = in_time(get(&origin, vec![0..1, bad], file.try_clone().unwrap())).await.unwrap().unwrap_err();
        assert_eq!(io::ErrorKind::InvalidInput, error.kind());
    }
    assert_eq!(0, file.metadata().unwrap().len());
}
