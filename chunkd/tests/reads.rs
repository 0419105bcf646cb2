//! How reads travel from an origin through hosts, with real sockets and TLS, and what peers can do to them.

mod common;

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use chunkd::fetch::Use;
use chunkd::image::Class;
use chunkd::limits::LimitsSpec;
use chunkd::manifest::{CHUNK, PAGE, to_usize};
use chunkd::registry::{ImageSpec, ParentSpec};
use chunkd::serve::{Export, Exports};
use common::{BadParent, Client, Content, Fault, Host};
use futures_util::future::{join, join_all};
use tokio::time::timeout;

const MIB: u32 = 1 << 20;

/// A parent that is silent for so long hangs, if nobody waits.
const PATIENCE_OF_FILLS: Duration = Duration::from_secs(10);

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
async fn a_page_that_names_nothing_but_zeros_does_not_travel() {
    let begin = u64::from(PAGE) * CHUNK;
    let mut data = vec![0; to_usize(begin)];
    data.extend([1; 512]);
    let content = Content::of(data);
    let hosts = chain(&content, &["one"]).await;
    assert_eq!([1; 512][..], in_time(60, hosts[1].read(begin, 512)).await);
    hosts[0].die();
    assert_eq!([0; 512][..], in_time(60, hosts[1].read(begin - 512, 512)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_readers_of_one_cold_range_fetch_it_once() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &["one"]).await;
    let reads = (0..10).map(|_| hosts[1].read(0, 256 << 10));
    let all = in_time(60, join_all(reads)).await;
    assert!(all.iter().all(|data| *data == content.data.slice(..256 << 10)));
    assert_eq!(256 << 10, hosts[1].fetched() + CHUNK); // the chunk of zeros does not travel
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_wait_while_no_parent_lives_and_go_on_when_one_is_back() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &["one"]).await;
    in_time(60, hosts[1].read(0, 4096)).await;
    hosts[0].registry.drop_image(common::IMAGE);
    in_time(60, no_parent_lives(&hosts[1])).await;
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
    let read = tokio::spawn(async move { image.read(0, 4096, false).await });
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
    in_time(60, no_parent_lives(&hosts[1])).await;
    assert!(timeout(Duration::from_millis(300), hosts[1].read(512 << 10, 4096)).await.is_err());
    hosts[0].admit(&["one"]);
    in_time(60, hosts[1].read(512 << 10, 4096)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_reads_its_own_image_and_no_other() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &[]).await;
    hosts[0].admit(&["one"]);
    assert!(in_time(60, Client::child(&hosts[0], "one", "another")).await.is_err());
    hosts[0].registry.drop_image(common::IMAGE);
    assert!(in_time(60, Client::child(&hosts[0], "one", &content.key)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_come_before_their_image_wait_for_it() {
    let content = Content::new(MIB);
    let host = Host::new("origin").await;
    host.admit(&["one"]);
    let mut vm = Box::pin(Client::vm(&host, &content.key));
    let mut child = Box::pin(Client::child(&host, "one", &content.key));
    assert!(timeout(Duration::from_millis(100), join(&mut vm, &mut child)).await.is_err());
    host.publish(&content).await;
    assert_eq!(content.data.slice(..4096), in_time(60, vm).await.unwrap().read(0, 4096).await);
    assert_eq!(content.data.slice(..4096), in_time(60, child).await.unwrap().read(0, 4096).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_is_cut_off_waits_for_no_image() {
    let host = Host::new("origin").await;
    host.admit(&["one"]);
    let mut child = Box::pin(Client::child(&host, "one", "key"));
    assert!(timeout(Duration::from_millis(100), &mut child).await.is_err());
    host.registry.close(common::IMAGE);
    let ended = in_time(60, child).await.err().expect("it is cut off");
    assert!(!ended.to_string().contains("no such image"), "it has waited to the end: {ended}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_other_hosts_wait_for_the_limits_and_those_of_programs_do_not() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &["one"]).await;
    let slow = NonZeroU64::new(1);
    let none = LimitsSpec::default();
    for (host, spec) in [(0, LimitsSpec { up: slow, ..none }), (1, LimitsSpec { down: slow, ..none })] {
        hosts[host].registry.limits.set(&spec);
        let offset = u64::from(MIB) / 2 * host as u64;
        let mut read = Box::pin(hosts[1].read(offset, 512 << 10));
        assert!(timeout(Duration::from_millis(100), &mut read).await.is_err());
        let mut vm = in_time(60, Client::vm(&hosts[0], &content.key)).await.unwrap();
        assert_eq!(content.data, in_time(60, vm.read(0, MIB)).await);
        hosts[host].registry.limits.set(&none);
        assert_eq!(512 << 10, in_time(60, read).await.len());
    }
    assert_eq!(content.data, in_time(60, hosts[1].read(0, MIB)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_answers_come_whole() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &[]).await;
    hosts[0].admit(&["one"]);
    let up = NonZeroU64::new(16 << 20);
    hosts[0].registry.limits.set(&LimitsSpec { up, ..LimitsSpec::default() });
    let mut child = in_time(60, Client::child(&hosts[0], "one", &content.key)).await.unwrap();
    let asked = [(0, 512), (512, 64 << 10), (7, 4096), (4096, 100_000), (0, MIB), (9, 1)];
    child.ask(&asked).await;
    for _ in asked {
        let (offset, data) = in_time(60, child.answer()).await;
        assert!(content.data[to_usize(offset)..].starts_with(&data));
        assert!(asked.contains(&(offset, u32::try_from(data.len()).unwrap())));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_too_many_waits_until_another_one_ends() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &[]).await;
    hosts[0].admit(&["one", "two"]);
    let most = |most| hosts[0].registry.limits.set(&LimitsSpec { connections: Some(most), ..LimitsSpec::default() });
    most(0);
    let mut first = Box::pin(Client::child(&hosts[0], "one", &content.key));
    assert!(timeout(Duration::from_millis(100), &mut first).await.is_err());
    most(1);
    let first = in_time(60, first).await.unwrap();
    let mut second = Box::pin(Client::child(&hosts[0], "two", &content.key));
    assert!(timeout(Duration::from_millis(100), &mut second).await.is_err());
    drop(first);
    in_time(60, second).await.unwrap();
}

/// What comes of a parent that does wrong.
#[derive(PartialEq)]
enum Then {
    /// The agent hears at once why it is left.
    Told(&'static str),
    /// The agent hears that it hangs once another parent answers.
    Hangs,
    /// It comes last, as one that starts again.
    Rests,
    NeverAsked,
}

/// A host with a bad parent, and a good one after that: every byte is right.
async fn survives(fault: Fault, then: Then) {
    let content = Content::new(4 * MIB);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    origin.admit(&["one"]);
    let bad = BadParent::new(&content, fault).await;
    let host = Host::new("one").await;
    let mut events = host.registry.events();
    host.attach(&content, &[bad.as_parent_of("one")]).await;
    // What the other parent answers before this one is connected would not show anything.
    let begun = async {
        match then {
            Then::Told(why) => while common::lost(&mut events).await != ("bad".to_owned(), why) {},
            Then::Hangs | Then::Rests => asked(&bad).await,
            Then::NeverAsked => {}
        }
    };
    in_time(60, begins(&host, begun)).await;
    host.attach(&content, &[bad.as_parent_of("one"), origin.as_parent_of("one")]).await;
    for offset in (0..4 * MIB).step_by(MIB as usize) {
        let data = in_time(60, host.read(offset.into(), MIB)).await;
        assert!(content.data.slice(offset as usize..(offset + MIB) as usize) == data, "wrong bytes, {fault:?}");
    }
    if then == Then::Hangs {
        while in_time(60, common::lost(&mut events)).await != ("bad".to_owned(), "hung") {}
    } else if then == Then::NeverAsked {
        assert_eq!(0, bad.asked.load(Ordering::SeqCst));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_parent_is_asked_less_and_less_for_what_it_lies_about() {
    let content = Content::new(MIB);
    let (parent, host) = below(&content, Fault::WrongBytes).await;
    let asked = || parent.asked.load(Ordering::SeqCst);
    let in_a_second = async {
        while asked() < 4 {
            tokio::time::sleep(Duration::from_millis(5)).await; // the list of pages, a page, and the chunk twice
        }
        let before = asked();
        tokio::time::sleep(Duration::from_secs(1)).await;
        asked() - before
    };
    tokio::select! {
        more = in_time(60, in_a_second) => assert!(more < 30, "{more}"), // without pauses some hundred times
        _ = host.read(0, 512) => panic!("there is no right answer"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_reads_by_the_parents_of_its_own_image_whoever_has_the_same_content() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &["one"]).await;
    for number in 0..8 {
        let name = format!("same-{number}"); // without a parent that lives
        hosts[1].registry.serve(ImageSpec { name, ..common::spec(&content, Vec::new()) }, None).await.unwrap();
    }
    let name = format!("{}/{}", common::IMAGE, content.key);
    let Some(Export::Disk(image)) = hosts[1].registry.find(&name) else { panic!("there is no {name}") };
    assert_eq!(content.data.slice(..512), in_time(60, image.read(0, 512, false)).await.unwrap());
    assert!(hosts[1].registry.find(&format!("{}/another", common::IMAGE)).is_none());
}

#[tokio::test]
async fn a_note_that_is_not_understood_is_as_none() {
    let content = Content::new(MIB);
    let host = Host::new("one").await;
    std::fs::write(host.folder.path().join("manifests").join(format!("{}.json", content.key)), "").unwrap();
    assert_eq!((0, 0), (host.registry.kept().unwrap().len(), host.registry.forget(&content.key).unwrap()));
}

/// Reads as long as that has not happened.
async fn begins(host: &Host, happened: impl Future<Output = ()>) {
    let read = async {
        host.read(0, 4 * MIB).await;
        std::future::pending::<()>().await;
    };
    tokio::select! { () = happened => {}, () = read => {} }
}

/// Waits until a parent has been asked for something.
async fn asked(parent: &BadParent) {
    while parent.asked.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// How a host uses its parents, when it does so as `wanted` says.
async fn uses(host: &Host, wanted: &[(&str, Use)]) {
    loop {
        let parents = host.registry.status(Some(common::IMAGE)).remove(0).parents;
        if parents.iter().map(|parent| (parent.host.as_str(), parent.state)).eq(wanted.iter().copied()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the host reads from no parent: connections of an image that is dropped end soon, not at once.
async fn no_parent_lives(host: &Host) {
    while host.registry.status(Some(common::IMAGE))[0].parents.iter().any(|parent| parent.state == Use::Active) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_that_cannot_be_reached_is_told_and_the_next_one_is_active() {
    let content = Content::new(MIB);
    let (origin, second, third) = (Host::new("origin").await, Host::new("second").await, Host::new("third").await);
    for parent in [&origin, &second, &third] {
        parent.publish(&content).await;
        parent.admit(&["one"]);
    }
    let host = Host::new("one").await;
    let mut events = host.registry.events();
    let parents = [&origin, &second, &third].map(|parent| parent.as_parent_of("one"));
    host.attach(&content, &parents).await;
    let (lost, active, standby) = (Use::Lost, Use::Active, Use::Standby);
    in_time(60, uses(&host, &[("origin", active), ("second", standby), ("third", standby)])).await;
    origin.die();
    assert_eq!(("origin".to_owned(), "dead"), in_time(60, common::lost(&mut events)).await);
    in_time(60, uses(&host, &[("origin", lost), ("second", active), ("third", standby)])).await;
    assert!(host.registry.status(Some("another")).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parents_that_hang_are_left_for_the_one_that_answers() {
    let content = Content::new(MIB);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    origin.admit(&["one"]);
    let bad = [
        BadParent::new(&content, Fault::StallsAfterHeader).await,
        BadParent::new(&content, Fault::StallsAfterHeader).await,
    ];
    let parents = [bad[0].as_parent_of("one"), bad[1].as_parent_of("one"), origin.as_parent_of("one")];
    let host = Host::new("one").await;
    let mut events = host.registry.events();
    host.attach(&content, &parents[..2]).await;
    in_time(60, begins(&host, asked(&bad[0]))).await;
    host.attach(&content, &parents).await;
    assert_eq!(content.data.slice(..4096), in_time(60, host.read(0, 4096)).await);
    assert_eq!(("bad".to_owned(), "hung"), in_time(60, common::lost(&mut events)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_parent_is_asked_less_than_a_fast_one() {
    let content = Content::new(8 * MIB);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    origin.admit(&["one"]);
    let slow = BadParent::new(&content, Fault::Late(Duration::from_millis(900))).await;
    let host = Host::new("one").await;
    host.attach(&content, &[slow.as_parent_of("one"), origin.as_parent_of("one")]).await;
    for offset in (0..8 * MIB).step_by(64 << 10) {
        in_time(60, host.read(offset.into(), 512)).await;
    }
    let asked = slow.asked.load(Ordering::SeqCst);
    assert!(asked < u64::from(8 * MIB) / CHUNK / 2, "asked {asked} times");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_in_another_place_is_asked_only_when_nobody_in_this_place_answers() {
    let content = Content::new(2 * MIB);
    let [near] = &chain(&content, &[]).await[..] else { panic!("an origin") };
    near.admit(&["one"]);
    let up = NonZeroU64::new(1 << 20); // so that answers come late
    near.registry.limits.set(&LimitsSpec { up, ..LimitsSpec::default() });
    let far = BadParent::new(&content, Fault::None).await;
    let host = Host::new("one").await;
    let away = ParentSpec { far: true, ..far.as_parent_of("one") };
    host.attach(&content, &[near.as_parent_of("one"), away]).await;
    in_time(60, uses(&host, &[("origin", Use::Active), ("bad", Use::Standby)])).await;
    in_time(60, host.read(0, 512)).await;
    let before = far.asked.load(Ordering::SeqCst); // for the manifest, if it was connected first
    for offset in (0..MIB).step_by(64 << 10) {
        in_time(60, host.read(offset.into(), 512)).await;
    }
    assert_eq!(before, far.asked.load(Ordering::SeqCst));
    near.die();
    in_time(60, host.read(0, 2 * MIB)).await;
    assert!(far.asked.load(Ordering::SeqCst) > before);
}

/// As in a tree through which an image comes to many hosts, where all wait for the same link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_from_which_all_is_filled_is_not_left_for_one_that_has_nothing_to_do() {
    let content = Content::new(8 * MIB);
    let busy = Host::new("origin").await;
    busy.publish(&content).await;
    busy.admit(&["one"]);
    let idle = BadParent::new(&content, Fault::None).await;
    let host = Host::new("one").await;
    host.attach(&content, &[busy.as_parent_of("one")]).await;
    in_time(60, host.read(0, 512)).await; // so this parent is connected first
    host.attach(&content, &[busy.as_parent_of("one"), idle.as_parent_of("one")]).await;
    busy.registry.limits.set(&LimitsSpec { up: NonZeroU64::new(16 << 20), ..LimitsSpec::default() });
    let size = u64::from(8 * MIB);
    host.registry.fill(common::IMAGE, vec![0..size; 1], Class::Soon, None).unwrap();
    in_time(60, filled(&host, size)).await;
    assert_eq!(0, idle.asked.load(Ordering::SeqCst));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_filled_by_way_of_a_host_has_that_host_be_as_patient() {
    let content = Content::new(MIB);
    let (parent, host) = below(&content, Fault::None).await;
    let two = Host::new("two").await;
    host.admit(&["two"]);
    two.attach(&content, &[host.as_parent_of("two")]).await;
    two.registry.fill(common::IMAGE, vec![0..MIB.into(); 1], Class::Soon, None).unwrap();
    in_time(60, filled(&two, MIB.into())).await;
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    let manifest = 2; // the list of pages, and a page
    assert_eq!(count(&parent.asked) - manifest, count(&parent.patient));
}

/// Somebody reads what is being filled already, from a parent that hangs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_joins_what_is_filled_is_not_as_patient() {
    let content = Content::new(2 * MIB);
    let hung = BadParent::new(&content, Fault::Late(Duration::from_secs(60))).await;
    hung.wrong.store(false, Ordering::SeqCst);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    origin.admit(&["one"]);
    let host = Host::new("one").await;
    host.attach(&content, &[hung.as_parent_of("one"), origin.as_parent_of("one")]).await;
    in_time(60, host.read(MIB.into(), 512)).await;
    in_time(60, uses(&host, &[("bad", Use::Active), ("origin", Use::Standby)])).await;
    hung.wrong.store(true, Ordering::SeqCst);
    host.registry.fill(common::IMAGE, vec![0..256 << 10; 1], Class::Soon, None).unwrap();
    in_time(60, begins(&host, asked(&hung))).await;
    let begun = Instant::now();
    assert_eq!(content.data.slice(..4096), in_time(60, host.read(0, 4096)).await);
    assert!(begun.elapsed() < PATIENCE_OF_FILLS, "{:?}", begun.elapsed());
}

/// A fill may hear nothing for longer than a read: that is no reason to read in another place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_that_is_silent_for_a_fill_is_read_from() {
    let content = Content::new(4 * MIB);
    let near = BadParent::new(&content, Fault::StallsAtBegin).await;
    let far = BadParent::new(&content, Fault::None).await;
    let host = Host::new("one").await;
    let away = ParentSpec { far: true, host: "far".to_owned(), ..far.as_parent_of("one") };
    host.attach(&content, &[near.as_parent_of("one"), away]).await;
    in_time(60, uses(&host, &[("bad", Use::Active), ("far", Use::Standby)])).await;
    in_time(60, host.read(MIB.into(), 512)).await;
    let before = far.asked.load(Ordering::SeqCst); // for the manifest, if it was connected first
    host.registry.fill(common::IMAGE, vec![0..256 << 10; 1], Class::Soon, None).unwrap();
    tokio::time::sleep(Duration::from_millis(1200)).await; // longer than a read waits
    for offset in (2 * MIB..3 * MIB).step_by(64 << 10) {
        in_time(60, host.read(offset.into(), 512)).await;
    }
    assert_eq!(before, far.asked.load(Ordering::SeqCst));
}

/// A limit lets fills wait for as long as others read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_joins_a_fill_of_a_child_has_its_turn_with_other_reads() {
    let content = Content::new(16 * MIB);
    let hosts = chain(&content, &["one", "two"]).await;
    for host in &hosts[1..] {
        in_time(60, host.read(0, 512)).await;
    }
    let one = &hosts[1];
    let down = NonZeroU64::new(1 << 20);
    one.registry.limits.set(&LimitsSpec { down, ..LimitsSpec::default() });
    let chunks = |from: u64| (from..from + 60).map(|chunk| chunk * CHUNK);
    let others = async {
        for offset in chunks(100) {
            one.read(offset, 512).await;
        }
    };
    let more = async {
        for offset in chunks(180) {
            one.read(offset, 512).await;
        }
    };
    let joined = async {
        one.registry.limits.reads.some().await;
        hosts[2].registry.fill(common::IMAGE, vec![20 * CHUNK..21 * CHUNK; 1], Class::Soon, None).unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await; // the fill waits there
        one.read(20 * CHUNK, 512).await;
    };
    tokio::select! {
        _ = join(others, more) => panic!("the read has waited for all others"),
        () = joined => {}
    }
}

/// As the last host of a long chain in which nobody has the image yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_from_which_all_is_filled_may_be_silent_for_longer_than_a_second() {
    let content = Content::new(256 << 10);
    let silent = BadParent::new(&content, Fault::Late(Duration::from_millis(1500))).await;
    let other = BadParent::new(&content, Fault::None).await;
    let host = Host::new("one").await;
    silent.wrong.store(false, Ordering::SeqCst);
    host.attach(&content, &[silent.as_parent_of("one")]).await;
    in_time(60, host.read(0, 512)).await; // so this parent is connected first
    host.attach(&content, &[silent.as_parent_of("one"), other.as_parent_of("one")]).await;
    silent.wrong.store(true, Ordering::SeqCst);
    let before = silent.asked.load(Ordering::SeqCst);
    host.registry.fill(common::IMAGE, vec![0..256 << 10; 1], Class::Soon, None).unwrap();
    in_time(60, filled(&host, 256 << 10)).await;
    assert!(silent.asked.load(Ordering::SeqCst) > before);
    assert!(host.registry.status(None)[0].parents.iter().all(|parent| parent.state != Use::Lost));
}

/// Hosts whose first parent does wrong from time to time, and reads at random: a thousand with WHOLE set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_parent_does_every_byte_is_right() {
    let rounds = if std::env::var_os("WHOLE").is_some() { 1000 } else { 10 };
    let content = Content::new(2 * MIB + 512);
    let origin = Host::new("origin").await;
    origin.publish(&content).await;
    origin.admit(&["one"]);
    let mut noise = blake3::Hasher::new().update(b"reads").finalize_xof();
    let mut random = |below: u32| {
        let mut bytes = [0; 4];
        noise.fill(&mut bytes);
        u32::from_le_bytes(bytes) % below
    };
    for round in 0..rounds {
        let fault = FAULTS[random(u32::try_from(FAULTS.len()).unwrap()) as usize];
        let bad = BadParent::new(&content, fault).await;
        let host = Host::new("one").await;
        host.attach(&content, &[bad.as_parent_of("one"), origin.as_parent_of("one")]).await;
        for _ in 0..8 {
            bad.wrong.store(random(3) > 0, Ordering::SeqCst);
            let offset = random(2 * MIB);
            let length = 1 + random(2 * MIB + 512 - offset);
            let read = timeout(Duration::from_secs(60), host.read(offset.into(), length)).await;
            let data = read.unwrap_or_else(|_| panic!("round {round}, {fault:?}: no answer in time"));
            assert!(data == content.data.slice(offset as usize..(offset + length) as usize), "{round}: {fault:?}");
        }
    }
}

const FAULTS: [Fault; 12] = [
    Fault::WrongBytes,
    Fault::WrongManifest,
    Fault::AnotherSize,
    Fault::AnswersBeyond,
    Fault::CutsInHalf,
    Fault::StallsAfterHeader,
    Fault::Late(Duration::from_secs(2)),
    Fault::ClosesAtRandom,
    Fault::Refuses,
    Fault::NoTls,
    Fault::AnotherKey,
    Fault::Silent,
];

macro_rules! faults {
    ($($name:ident: $fault:expr, $then:expr;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                survives($fault, $then).await;
            }
        )*
    };
}

faults! {
    a_parent_that_lies_reaches_no_reader: Fault::WrongBytes, Then::Told("lying");
    a_parent_with_a_wrong_manifest_is_left: Fault::WrongManifest, Then::Told("lying");
    a_parent_that_answers_beyond_the_question_comes_last: Fault::AnswersBeyond, Then::Rests;
    a_parent_that_serves_another_size_is_not_read_from: Fault::AnotherSize, Then::NeverAsked;
    an_answer_that_is_cut_in_half_is_asked_for_again: Fault::CutsInHalf, Then::Rests;
    a_parent_that_stalls_in_an_answer_is_left: Fault::StallsAfterHeader, Then::Hangs;
    a_parent_that_answers_two_seconds_late_is_left: Fault::Late(Duration::from_secs(2)), Then::Hangs;
    a_parent_that_closes_at_random_costs_no_error: Fault::ClosesAtRandom, Then::Rests;
    a_parent_that_cannot_read_is_left: Fault::Refuses, Then::Told("dead");
    a_parent_without_tls_is_not_read_from: Fault::NoTls, Then::NeverAsked;
    a_parent_with_another_key_is_not_read_from: Fault::AnotherKey, Then::NeverAsked;
    a_parent_that_does_not_greet_is_not_waited_for: Fault::Silent, Then::NeverAsked;
}

#[tokio::test]
async fn an_origin_without_its_whole_manifest_is_refused() {
    let content = Content::new(MIB);
    let origin = Host::new("origin").await;
    let file = std::fs::File::open(origin.folder.path().join("pool")).unwrap();
    let mut spec = common::spec(&content, Vec::new());
    spec.mark = Some("1".to_owned());
    assert!(origin.registry.serve(spec, Some(file)).await.unwrap_err().to_string().contains("publish it again"));
    assert!(origin.registry.status(None).is_empty());
}

/// Waits until all is filled that is to be.
async fn filled(host: &Host, of: u64) {
    let status = || host.registry.status(None).remove(0);
    while status().filled != (of, of) || status().filling {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A host whose only parent does wrong.
async fn below(content: &Content, fault: Fault) -> (BadParent, Host) {
    let (bad, host) = (BadParent::new(content, fault).await, Host::new("one").await);
    host.attach(content, &[bad.as_parent_of("one")]).await;
    (bad, host)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_filled_is_read_without_a_parent() {
    let content = Content::new(2 * MIB);
    let hosts = chain(&content, &["one"]).await;
    let size = u64::from(2 * MIB);
    hosts[1].registry.fill(common::IMAGE, vec![size / 2..u64::MAX, 0..CHUNK], Class::Soon, None).unwrap();
    in_time(60, filled(&hosts[1], size / 2 + CHUNK)).await;
    assert!(!hosts[1].registry.status(None)[0].whole);
    hosts[0].registry.drop_image(common::IMAGE);
    assert_eq!(content.data.slice(MIB as usize..), in_time(60, hosts[1].read(size / 2, MIB)).await);
    hosts[1].registry.fill(common::IMAGE, vec![CHUNK..2 * CHUNK, 0..size], Class::Soon, None).unwrap(); // waits, and is replaced
    assert!(hosts[1].registry.status(None)[0].filling);
    hosts[1].registry.fill(common::IMAGE, Vec::new(), Class::Soon, None).unwrap();
    in_time(60, filled(&hosts[1], 0)).await;
    assert!(hosts[1].registry.fill("another", Vec::new(), Class::Soon, None).is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filling_has_several_requests_on_their_way_and_asks_for_nothing_twice() {
    let content = Content::new(8 * MIB);
    let (parent, host) = below(&content, Fault::Late(Duration::from_millis(20))).await;
    let size = u64::from(8 * MIB);
    for _ in 0..2 {
        host.registry.fill(common::IMAGE, vec![0..size; 1], Class::Soon, None).unwrap();
        tokio::select! {
            () = in_time(60, filled(&host, size)) => {}
            () = host.registry.limits.reads.some() => panic!("filling counts as a read"),
        }
        assert_eq!(size - 2 * CHUNK, host.fetched()); // but for the hole
        assert!(host.registry.status(None)[0].whole);
    }
    let busiest = parent.busiest.load(Ordering::SeqCst);
    assert!(busiest > 2, "{busiest}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filling_has_one_request_on_its_way_while_a_read_waits() {
    fills_while_a_read_waits(Class::Soon).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filling_in_the_idle_class_rests_most_of_the_time_while_a_read_waits() {
    // Twelve requests of 5 ms at least; each is followed by nine times as long a rest.
    assert!(fills_while_a_read_waits(Class::Idle).await > Duration::from_millis(12 * 50));
}

/// Returns how long that took.
async fn fills_while_a_read_waits(class: Class) -> Duration {
    let content = Content::new(4 * MIB);
    let (parent, host) = below(&content, Fault::StallsAtBegin).await;
    let waiting = host.read(0, 4096);
    let filling = async {
        while parent.asked.load(Ordering::SeqCst) < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await; // the list of pages, a page, and what is read
        }
        let (rest, begun) = (MIB.into()..u64::from(4 * MIB), Instant::now());
        host.registry.fill(common::IMAGE, vec![rest; 1], class, None).unwrap();
        filled(&host, u64::from(3 * MIB)).await;
        begun.elapsed()
    };
    let took = tokio::select! {
        took = in_time(60, filling) => took,
        _ = waiting => panic!("it has no answer"),
    };
    assert_eq!(2, parent.busiest.load(Ordering::SeqCst));
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filling_that_is_cancelled_asks_for_nothing_more() {
    let content = Content::new(32 * MIB);
    let hosts = chain(&content, &["one"]).await;
    let (registry, limits) = (&hosts[1].registry, &hosts[1].registry.limits);
    in_time(60, hosts[1].read(0, 512)).await; // the names of all chunks are here
    limits.set(&LimitsSpec { down: NonZeroU64::new(1), ..LimitsSpec::default() });
    registry.fill(common::IMAGE, vec![0..u64::MAX; 1], Class::Soon, None).unwrap(); // waits for the limit
    registry.fill(common::IMAGE, Vec::new(), Class::Soon, None).unwrap();
    limits.set(&LimitsSpec::default());
    for chunk in 384..512 {
        in_time(60, hosts[1].read(chunk * CHUNK, 512)).await; // a while in which it would go on
    }
    assert!(hosts[1].fetched() < 9 * u64::from(MIB), "{}", hosts[1].fetched());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filling_keeps_to_the_limit() {
    let content = Content::new(2 * MIB);
    let hosts = chain(&content, &["one"]).await;
    let (size, limits) = (u64::from(2 * MIB), &hosts[1].registry.limits);
    in_time(60, hosts[1].read(0, 512)).await; // the names of all chunks are here
    limits.set(&LimitsSpec { down: NonZeroU64::new(1), ..LimitsSpec::default() });
    hosts[1].registry.fill(common::IMAGE, vec![0..size; 1], Class::Soon, None).unwrap();
    assert!(timeout(Duration::from_millis(100), filled(&hosts[1], size)).await.is_err());
    limits.set(&LimitsSpec::default());
    in_time(60, filled(&hosts[1], size)).await;
}

#[tokio::test]
async fn an_origin_has_nothing_to_fill() {
    let content = Content::new(MIB);
    let hosts = chain(&content, &[]).await;
    hosts[0].registry.fill(common::IMAGE, vec![0..u64::MAX; 1], Class::Soon, None).unwrap();
    in_time(60, filled(&hosts[0], MIB.into())).await;
}

/// A host with a pool of 4 MiB that reads this content from the origin.
async fn small(content: &Content) -> (Host, Host) {
    let (origin, host) = (Host::new("origin").await, Host::new("one").await);
    let pool = host.folder.path().join("pool");
    host.registry.pool.remove(&pool);
    host.registry.pool.add(&pool.with_extension("small"), 4 << 20, 0, true).unwrap();
    origin.admit(&["one"]);
    origin.publish(content).await;
    host.attach(content, &[origin.as_parent_of("one")]).await;
    (origin, host)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_image_stays_until_its_pin_ends() {
    let pinned = Content::new(2 * MIB);
    let (origin, host) = small(&pinned).await;
    host.registry.pin(&pinned.key, u64::MAX).unwrap();
    host.registry.fill(common::IMAGE, vec![0..u64::MAX; 1], Class::Soon, None).unwrap();
    in_time(60, filled(&host, pinned.data.len() as u64)).await;
    let large = Content::of(Content::new(8 * MIB).data.iter().rev().copied().collect());
    origin.publish(&large).await;
    host.attach(&large, &[origin.as_parent_of("one")]).await;
    let travels = u64::from(2 * MIB) - 2 * CHUNK;
    for (end, stays) in [(u64::MAX, true), (0, false)] {
        host.registry.pin(&pinned.key, end).unwrap();
        for _ in 0..2 {
            in_time(60, host.read(0, 8 * MIB)).await;
        }
        assert_eq!(stays, host.registry.held(&pinned.key, false).unwrap() == travels);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filling_ends_when_a_pinned_image_has_all_of_the_pool() {
    let content = Content::new(8 * MIB);
    let (_origin, host) = small(&content).await;
    host.registry.pin(&content.key, u64::MAX).unwrap();
    host.registry.fill(common::IMAGE, vec![0..u64::MAX; 1], Class::Soon, None).unwrap();
    let status = || host.registry.status(None).remove(0);
    while status().filling {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!status().whole && status().held == host.registry.pool.usage().1);
    assert!(
        host.registry
            .fill(common::IMAGE, vec![0..u64::MAX; 1], Class::Soon, None)
            .unwrap_err()
            .to_string()
            .contains("no room")
    );
    assert_eq!(content.data, in_time(60, host.read(0, 8 * MIB)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_disks_of_vms_read_makes_a_boot_set_and_what_others_read_does_not() {
    let content = Content::new(4 * MIB);
    let hosts = chain(&content, &[]).await;
    hosts[0].admit(&["one"]);
    let mut child = in_time(60, Client::child(&hosts[0], "one", &content.key)).await.unwrap();
    in_time(60, child.read(0, MIB)).await;
    let mut program = in_time(60, Client::vm(&hosts[0], common::IMAGE)).await.unwrap();
    in_time(60, program.read(2 * u64::from(MIB), MIB)).await;
    let mut vm = in_time(60, Client::vm(&hosts[0], &format!("{}/{}", common::IMAGE, content.key))).await.unwrap();
    in_time(60, vm.read(u64::from(MIB), MIB)).await;
    assert_eq!(None, hosts[0].registry.boot_set(common::IMAGE).unwrap()); // the boot goes on
    let Some(Export::Image(image)) = hosts[0].registry.find(common::IMAGE) else { panic!("it is served") };
    let after = std::time::Instant::now() + Duration::from_secs(120);
    assert_eq!(Some(vec![u64::from(MIB)..u64::from(2 * MIB); 1]), image.boot_set.complete(after));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_is_forgotten_leaves_what_another_one_shares() {
    let first = Content::new(MIB);
    let mut data = first.data.to_vec();
    data[..4096].fill(1); // another first chunk
    let second = Content::of(data);
    let host = Host::new("one").await;
    for content in [&first, &second] {
        let origin = Host::new("origin").await;
        origin.publish(content).await;
        origin.admit(&["one"]);
        host.attach(content, &[origin.as_parent_of("one")]).await;
        in_time(60, host.read(0, MIB)).await;
    }
    let travels = u64::from(MIB) - 2 * CHUNK;
    assert_eq!(CHUNK, host.fetched()); // of the second one
    let held = |content: &Content, alone| host.registry.held(&content.key, alone).unwrap(); // one is served, one is not
    while held(&second, false) < travels {
        tokio::time::sleep(Duration::from_millis(5)).await; // a reader has a chunk before the pool has it
    }
    assert_eq!((travels, CHUNK), (held(&first, false), held(&first, true)));
    assert!(host.registry.forget(&second.key).is_err()); // it is served
    assert_eq!(CHUNK, host.registry.forget(&first.key).unwrap());
    assert_eq!((0, travels), (held(&first, false), held(&second, false)));
    host.registry.drop_image(common::IMAGE);
    assert_eq!(travels, host.registry.forget(&second.key).unwrap());
    assert!(host.registry.kept().unwrap().is_empty());
}
