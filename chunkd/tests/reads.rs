//! How reads travel from an origin through hosts, with real sockets and TLS, and what peers can do to them.

mod common;

use std::time::{Duration, Instant};

use chunkd::manifest::CHUNK;
use common::{BadParent, Content, Fault, Host};
use tokio::time::timeout;

const MIB: usize = 1 << 20;

/// An origin and hosts below it, each the only parent of the next.
async fn chain(content: &Content, names: &[&str]) -> Vec<Host> {
    let mut hosts = vec![Host::new("origin").await];
    hosts[0].publish(content).await;
    for &name in names {
        let host = Host::new(name).await;
        let parent = &hosts[hosts.len() - 1];
        parent.admit(&[name]);
        host.attach(content, &[parent.as_parent_of(name)]).await;
        hosts.push(host);
    }
    hosts
}

async fn in_time<T>(seconds: u64, act: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(seconds), act).await.expect("in time")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_brings_each_chunk_once_to_each_host_and_no_zeros() {
    let content = Content::new(3 * MIB + 1536);
    let hosts = chain(&content, &["one", "two", "three"]).await;
    let whole = u32::try_from(content.data.len()).unwrap();
    assert_eq!(content.data, in_time(60, hosts[3].read(0, whole)).await);
    let travels = content.data.len() as u64 - 2 * CHUNK;
    assert_eq!([travels; 3], [1, 2, 3].map(|host| hosts[host].fetched()));
    assert_eq!(content.data.slice(5..70_000), in_time(60, hosts[3].read(5, 69_995)).await);
    assert_eq!(travels, hosts[3].fetched());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_readers_of_one_cold_range_fetch_it_once() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &["one"]).await;
    let reads = (0..10).map(|_| hosts[1].read(0, 256 << 10));
    let all = in_time(60, futures_all(reads)).await;
    assert!(all.iter().all(|data| *data == content.data.slice(..256 << 10)));
    assert_eq!(256 << 10, hosts[1].fetched() + 1 * CHUNK); // with a chunk of zeros
}

async fn futures_all<T>(all: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut done = Vec::new();
    let mut waiting: Vec<_> = all.map(Box::pin).collect();
    std::future::poll_fn(|context| {
        waiting.retain_mut(|each| match each.as_mut().poll(context) {
            std::task::Poll::Ready(value) => {
                done.push(value);
                false
            }
            std::task::Poll::Pending => true,
        });
        if waiting.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    done
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_wait_while_no_parent_lives_and_go_on_when_one_is_back() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &["one"]).await;
    in_time(60, hosts[1].read(0, 4096)).await;
    hosts[0].registry.drop_image(common::IMAGE);
    let mut read = Box::pin(hosts[1].read(512 << 10, 4096));
    assert!(timeout(Duration::from_millis(300), &mut read).await.is_err());
    hosts[0].publish(&content).await;
    hosts[0].admit(&["one"]);
    assert_eq!(content.data.slice(512 << 10..(512 << 10) + 4096), in_time(60, read).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_waits_ends_when_the_image_is_dropped() {
    let content = Content::new(MIB);
    let host = Host::new("one").await;
    host.attach(&content, &[]).await;
    let Some(chunkd::serve::Export::Image(image)) = chunkd::serve::Exports::find(&*host.registry, common::IMAGE) else {
        panic!("it is served")
    };
    let read = tokio::spawn(async move { image.read(0, 4096).await });
    tokio::task::yield_now().await;
    host.registry.drop_image(common::IMAGE);
    assert!(in_time(10, read).await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_is_named_no_more_is_cut_off() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &["one"]).await;
    in_time(60, hosts[1].read(0, 4096)).await;
    hosts[0].admit(&["another"]);
    assert!(timeout(Duration::from_millis(300), hosts[1].read(512 << 10, 4096)).await.is_err());
    hosts[0].admit(&["one"]);
    in_time(60, hosts[1].read(512 << 10, 4096)).await;
}

/// A host with a bad parent, and a good one after that: all is right, and the bad one is left.
async fn survives(fault: Fault, within: Duration) {
    let content = Content::new(4 * MIB);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    origin.admit(&["one"]);
    let bad = BadParent::new(&content, fault).await;
    let host = Host::new("one").await;
    host.attach(&content, &[bad.as_parent_of("one"), origin.as_parent_of("one")]).await;
    let begun = Instant::now();
    for offset in (0..content.data.len()).step_by(MIB) {
        let data = in_time(60, host.read(offset as u64, MIB as u32)).await;
        assert!(content.data.slice(offset..offset + MIB) == data, "wrong bytes, {fault:?}");
    }
    assert!(begun.elapsed() < within, "{fault:?} took {:?}", begun.elapsed());
}

macro_rules! faults {
    ($($name:ident: $fault:expr;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                survives($fault, Duration::from_secs(20)).await;
            }
        )*
    };
}

faults! {
    a_parent_that_lies_reaches_no_reader: Fault::WrongBytes;
    an_answer_that_is_cut_in_half_is_asked_for_again: Fault::CutsInHalf;
    a_parent_that_stalls_in_an_answer_is_left: Fault::StallsAfterHeader;
    a_parent_that_answers_two_seconds_late_is_left: Fault::Late(Duration::from_secs(2));
    a_parent_that_closes_at_random_costs_no_error: Fault::ClosesAtRandom;
    a_parent_that_cannot_read_is_left: Fault::Refuses;
    a_parent_without_tls_is_not_read_from: Fault::NoTls;
    a_parent_with_another_key_is_not_read_from: Fault::AnotherKey;
    a_parent_that_does_not_greet_is_not_waited_for: Fault::Silent;
}
