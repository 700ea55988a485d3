// SPDX-License-Identifier: GPL-2.0

//! Devices with several planes: equal load, planes that die, return, come and go, ends with
//! different ones, and addresses that are not the peer's.

#![forbid(unsafe_code)]

mod common;

use common::{drain, hosts, stream_writes, BASE, RKEY};
use metaroce::proto::api::{Status, Time};
use metaroce::proto::connection::{Health, PlaneState};
use metaroce::proto::wire::{Body, Packet, PlaneAddress};
use metaroce_sim::{gid_on, write, Link, Note, QpSetup, Sim, MS, S, US};

/// kbit/s of a plane's link.
const RATE: u64 = 10_000_000;

fn link() -> Link {
    let mut l = Link::new(RATE, 5 * US);
    l.mark = 40;
    l
}

/// Two hosts with these planes, on a fabric of `n`, whose connection is up and whose planes
/// have been tried.
fn planes(seed: u64, n: usize, a: &[u8], b: &[u8], paths: u8) -> (Sim, usize) {
    let mut sim = hosts(seed, paths);
    sim.fabric.planes = n;
    sim.fabric.spines(0, 1, n, &link());
    for (h, ids) in [(0, a), (1, b)] {
        sim.hosts[h].skip_crc = true;
        if ids.len() > 1 {
            sim.hosts[h].set_planes(0, ids, &[]);
        }
    }
    let (qa, _) = sim.connect(0, 1, &QpSetup::default());
    sim.run_for(40 * MS);
    (sim, qa)
}

/// Paths of host 0 by plane, of planes that work.
fn paths_by_plane(sim: &mut Sim, q: usize) -> Vec<u32> {
    sim.hosts[0]
        .connection(q)
        .planes()
        .filter(|p| p.state == PlaneState::Working)
        .map(|p| p.paths.count_ones())
        .collect()
}

/// What went from host 0 to host 1 meanwhile, by plane.
fn sent(sim: &Sim, before: &[u64]) -> Vec<u64> {
    let now = sim.fabric.plane_bytes(0, 1);
    now.iter().zip(before).map(|(a, b)| a - b).collect()
}

fn all(n: usize) -> Vec<u8> {
    (0..n as u8).collect()
}

/// Host 0 changes its planes, now.
fn set_planes(sim: &mut Sim, h: usize, ids: &[u8], draining: &[u8]) {
    let now = sim.now;
    sim.hosts[h].set_planes(now, ids, draining);
    sim.pump(h);
}

#[test]
fn bandwidth_is_linear_in_planes() {
    let mut one = 0.0;
    for n in [1, 2, 3, 4, 8] {
        let (mut sim, q) = planes(n as u64, n, &all(n), &all(n), 16);
        let paths = paths_by_plane(&mut sim, q);
        assert_eq!(paths.len(), n);
        assert!(paths
            .iter()
            .all(|p| (16 / n as u32..=16 / n as u32 + 1).contains(p)));
        stream_writes(&mut sim, &[q], 64, 2 * MS);
        let before = sim.fabric.plane_bytes(0, 1);
        let rate = stream_writes(&mut sim, &[q], 64, 10 * MS).rate;
        let bytes = sent(&sim, &before);
        println!("{n} planes: {rate:.0} Mbit/s, {bytes:?}");
        if n == 1 {
            one = rate;
        }
        assert!(rate >= 0.97 * n as f64 * one);
        let (least, most) = (bytes.iter().min(), bytes.iter().max());
        let (least, most) = (*least.expect("some"), *most.expect("some"));
        assert!(least as f64 >= 0.95 * most as f64);
    }
}

/// Light load is equal, too.
#[test]
fn single_writes_are_spread_equally() {
    for (n, paths) in [(4, 16), (3, 4), (2, 3)] {
        let (mut sim, q) = planes(3, n, &all(n), &all(n), paths);
        let before = sim.fabric.plane_bytes(0, 1);
        stream_writes(&mut sim, &[q], 1, 20 * MS);
        let bytes = sent(&sim, &before);
        let sum: u64 = bytes.iter().sum();
        println!("{paths} paths: {bytes:?}");
        assert!(bytes.iter().all(|b| *b * 10 * n as u64 > sum * 9));
    }
}

#[test]
fn a_plane_dies_and_returns() {
    for dead in [0, 2] {
        let (mut sim, q) = planes(10 + dead as u64, 4, &all(4), &all(4), 16);
        stream_writes(&mut sim, &[q], 64, 4 * MS);
        let before = stream_writes(&mut sim, &[q], 64, 4 * MS).rate;
        sim.fabric.set_plane(0, 1, dead, false);
        stream_writes(&mut sim, &[q], 64, MS);
        let during = stream_writes(&mut sim, &[q], 64, 4 * MS);
        println!("{before:.0}, then {:.0} Mbit/s", during.rate);
        assert!(during.rate >= 0.97 * 0.75 * before);
        stream_writes(&mut sim, &[q], 16, 100 * MS);
        sim.fabric.set_plane(0, 1, dead, true);
        stream_writes(&mut sim, &[q], 16, 600 * MS);
        let bytes = sim.fabric.plane_bytes(0, 1);
        let after = stream_writes(&mut sim, &[q], 64, 4 * MS).rate;
        let bytes = sent(&sim, &bytes);
        println!("afterwards {after:.0} Mbit/s, {bytes:?}");
        assert!(after >= 0.95 * before);
        drain(&mut sim, &[q], 100 * MS);
    }
}

/// A plane that is lost is left within two retransmission timeouts, here 2 × (2 × RTT +
/// variation, at least half of the margin of 200 µs): no message takes longer.
#[test]
fn a_lost_plane_is_left_in_time() {
    for seed in 20..40 {
        let (mut sim, q) = planes(seed, 4, &all(4), &all(4), 16);
        stream_writes(&mut sim, &[q], 32, 2 * MS);
        sim.fabric.set_plane(0, 1, (seed % 4) as usize, false);
        let start = sim.now;
        let mut longest = 0;
        // The last packet that goes to the dead plane and carries something.
        let c = |sim: &mut Sim| {
            let dead = (seed % 4) as u8;
            let core = sim.hosts[0].connection(q);
            let on = |p: u8| core.plane(p).is_some_and(|p| p.local == dead);
            core.paths()
                .filter(|p| on(p.plane))
                .map(|p| p.packets)
                .sum::<u64>()
        };
        let mut packets = c(&mut sim);
        for _ in 0..40 {
            stream_writes(&mut sim, &[q], 32, 50 * US);
            let now = c(&mut sim);
            if now != packets {
                longest = sim.now - start;
            }
            packets = now;
        }
        println!(
            "last new packet to the dead plane within {} us",
            longest / US
        );
        assert!(longest <= 600 * US);
    }
}

#[test]
fn planes_are_added_and_removed() {
    let (mut sim, q) = planes(50, 4, &[0], &[0], 16);
    let one = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    for n in [2, 3, 4] {
        set_planes(&mut sim, 0, &all(n), &[]);
        set_planes(&mut sim, 1, &all(n), &[]);
        stream_writes(&mut sim, &[q], 64, 150 * MS);
        let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
        println!("{n} planes: {rate:.0} Mbit/s");
        assert!(rate >= 0.95 * n as f64 * one);
    }
    // One drains: nothing is lost by that, and soon nothing goes there.
    let resent = sim.hosts[0].connection(q).counters().retransmits;
    set_planes(&mut sim, 0, &all(4), &[1]);
    stream_writes(&mut sim, &[q], 64, MS);
    let before = sim.fabric.plane_bytes(0, 1);
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    let bytes = sent(&sim, &before);
    println!("plane 1 drains: {rate:.0} Mbit/s, {bytes:?}");
    assert!(rate >= 0.95 * 3.0 * one);
    assert_eq!(bytes[1], 0);
    let more = sim.hosts[0].connection(q).counters().retransmits - resent;
    assert!(more <= 2, "{more} resent");
    // The peer withdraws another one.
    stream_writes(&mut sim, &[q], 64, 150 * MS);
    set_planes(&mut sim, 1, &[0, 1, 2], &[]);
    stream_writes(&mut sim, &[q], 64, 5 * MS);
    let before = sim.fabric.plane_bytes(0, 1);
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    let bytes = sent(&sim, &before);
    println!("plane 3 withdrawn: {rate:.0} Mbit/s, {bytes:?}");
    assert!(rate >= 0.95 * 2.0 * one);
    assert_eq!((bytes[1], bytes[3]), (0, 0));
    // The one that names the connection goes, and everything is as it was in the end.
    stream_writes(&mut sim, &[q], 64, 150 * MS);
    set_planes(&mut sim, 0, &[1, 2, 3], &[]);
    stream_writes(&mut sim, &[q], 64, 150 * MS);
    let before = sim.fabric.plane_bytes(0, 1);
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    let bytes = sent(&sim, &before);
    println!("without plane 0: {rate:.0} Mbit/s, {bytes:?}");
    assert_eq!((bytes[0], bytes[3]), (0, 0));
    assert!(rate >= 0.95 * 2.0 * one);
    for h in 0..2 {
        set_planes(&mut sim, h, &all(4), &[]);
    }
    stream_writes(&mut sim, &[q], 64, 300 * MS);
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    println!("all again: {rate:.0} Mbit/s");
    assert!(rate >= 0.95 * 4.0 * one);
    drain(&mut sim, &[q], 100 * MS);
}

#[test]
fn ends_with_different_planes() {
    // On separate fabrics those that both have are used.
    let (mut sim, q) = planes(60, 4, &all(4), &[0, 2], 16);
    assert_eq!(paths_by_plane(&mut sim, q), [8, 8]);
    let before = sim.fabric.plane_bytes(0, 1);
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    let bytes = sent(&sim, &before);
    println!("4 and 2 planes: {rate:.0} Mbit/s, {bytes:?}");
    assert!(rate >= 17_000.0 && bytes[1] == 0 && bytes[3] == 0);
    // One network: all lines are used, by either end, whoever has more of them.
    for (a, b) in [(4, 2), (2, 4), (4, 1), (1, 4)] {
        let mut sim = hosts(61, 16);
        sim.fabric.planes = 4;
        sim.fabric.routed = true;
        sim.fabric.spines(0, 1, 4, &link());
        for (h, n) in [(0, a), (1, b)] {
            sim.hosts[h].skip_crc = true;
            sim.hosts[h].set_planes(0, &all(n), &[]);
        }
        let (q, _) = sim.connect(0, 1, &QpSetup::default());
        sim.run_for(40 * MS);
        stream_writes(&mut sim, &[q], 64, 2 * MS);
        let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
        println!("{a} and {b} planes of one network: {rate:.0} Mbit/s");
        assert!(rate >= 0.9 * a as f64 * 9_500.0);
        assert_eq!(paths_by_plane(&mut sim, q).len(), 4);
    }
}

/// Two hosts with four planes, of which host 0 sends over those of `named`.
fn named(seed: u64, named: u8) -> (Sim, usize) {
    let mut sim = hosts(seed, 16);
    sim.fabric.planes = 4;
    sim.fabric.spines(0, 1, 4, &link());
    sim.hosts[0].config.planes = named;
    for h in 0..2 {
        sim.hosts[h].skip_crc = true;
        sim.hosts[h].set_planes(0, &all(4), &[]);
    }
    let (q, _) = sim.connect(0, 1, &QpSetup::default());
    sim.run_for(40 * MS);
    (sim, q)
}

/// Planes that carried more than a hundredth of what host `from` sent meanwhile.
fn used(sim: &mut Sim, q: usize, from: usize) -> Vec<usize> {
    let before = sim.fabric.plane_bytes(from, 1 - from);
    stream_writes(sim, &[q], 64, 5 * MS);
    let now = sim.fabric.plane_bytes(from, 1 - from);
    let bytes: Vec<u64> = now.iter().zip(&before).map(|(a, b)| a - b).collect();
    let sum: u64 = bytes.iter().sum();
    println!("from host {from}: {bytes:?}");
    (0..bytes.len()).filter(|i| bytes[*i] * 100 > sum).collect()
}

/// An end sends over the planes that it is to use; the other one over all.
#[test]
fn only_named_planes_are_sent_over() {
    for (seed, names, planes) in [
        (91, 0b0100, vec![2]),
        (92, 0b0001, vec![0]),
        (93, 0b1010, vec![1, 3]),
        (94, 0b1111, all(4).into_iter().map(usize::from).collect()),
    ] {
        let (mut sim, q) = named(seed, names);
        stream_writes(&mut sim, &[q], 64, 2 * MS);
        let before = sim.fabric.plane_bytes(0, 1);
        let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
        let bytes = sent(&sim, &before);
        println!("planes {names:#b}: {rate:.0} Mbit/s, {bytes:?}");
        for (plane, bytes) in bytes.iter().enumerate() {
            assert_eq!(*bytes != 0, planes.contains(&plane), "plane {plane}");
        }
        assert!(rate >= 0.97 * planes.len() as f64 * 9_500.0);
        assert_eq!(sim.hosts[0].connection(q).planes_named(), names);
        let mut paths = paths_by_plane(&mut sim, q);
        paths.retain(|n| *n != 0);
        assert_eq!(paths, vec![16 / planes.len() as u32; planes.len()]);
        // Acknowledgements come over all: that is the other end's choice.
        assert_eq!(used(&mut sim, q, 1), [0, 1, 2, 3]);
    }
}

/// A named plane that is not there does not keep the connection from the others, and is used as
/// soon as it comes.
#[test]
fn named_planes_come_and_go() {
    let (mut sim, q) = named(95, 0b1000_1000);
    assert_eq!(used(&mut sim, q, 0), [3]);
    for h in [0, 1] {
        set_planes(&mut sim, h, &[0, 1, 2], &[]);
        stream_writes(&mut sim, &[q], 64, 150 * MS);
        assert_eq!(used(&mut sim, q, 0), [0, 1, 2]);
        set_planes(&mut sim, h, &all(4), &[]);
        stream_writes(&mut sim, &[q], 64, 300 * MS);
        assert_eq!(used(&mut sim, q, 0), [3]);
    }
    set_planes(&mut sim, 0, &all(4), &[3]);
    stream_writes(&mut sim, &[q], 64, 150 * MS);
    assert_eq!(used(&mut sim, q, 0), [0, 1, 2]);
    drain(&mut sim, &[q], 100 * MS);
}

/// Losses are no reason to use a plane that is not named: what is sent waits for those that are.
#[test]
fn a_silent_named_plane_is_waited_for() {
    let (mut sim, q) = named(96, 0b0010);
    assert_eq!(used(&mut sim, q, 0), [1]);
    sim.fabric.set_plane(0, 1, 1, false);
    let before = sim.fabric.plane_bytes(0, 1);
    let silent = stream_writes(&mut sim, &[q], 64, 200 * MS);
    let bytes = sent(&sim, &before);
    println!("{} Writes, {bytes:?}", silent.done);
    assert_eq!((bytes[0], bytes[2], bytes[3]), (0, 0, 0));
    sim.fabric.set_plane(0, 1, 1, true);
    drain(&mut sim, &[q], 2 * S);
    assert_eq!(used(&mut sim, q, 0), [1]);
}

/// A driver that serves one plane only takes no notice of the peer's others.
#[test]
fn one_end_knows_nothing_of_planes() {
    let (mut sim, q) = planes(65, 2, &[0], &[0, 1], 8);
    assert_eq!(paths_by_plane(&mut sim, q), [8]);
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    assert!(rate >= 9_000.0);
    // It has answered, so the announcement does not go on.
    let c = sim.hosts[1].connection_at(0).expect("there");
    assert_eq!(
        c.planes()
            .filter(|p| p.state == PlaneState::Working)
            .count(),
        1
    );
    let packets = |sim: &mut Sim| sim.fabric.link(1, 0, 0).stats.packets;
    sim.run_for(S);
    let before = packets(&mut sim);
    sim.run_for(S);
    assert!(packets(&mut sim) - before <= 2);
}

#[test]
fn planes_of_different_speed() {
    let (mut sim, q) = planes(70, 4, &all(4), &all(4), 16);
    for pair in [(0, 1), (1, 0)] {
        sim.fabric.link(pair.0, pair.1, 3).rate = RATE / 4;
        sim.fabric.link(pair.0, pair.1, 2).delay = 50 * US;
    }
    stream_writes(&mut sim, &[q], 128, 20 * MS);
    let before = sim.fabric.plane_bytes(0, 1);
    let rate = stream_writes(&mut sim, &[q], 128, 20 * MS).rate;
    let bytes = sent(&sim, &before);
    println!("{rate:.0} Mbit/s, {bytes:?}");
    assert!(rate >= 0.9 * 3.25 * 9_600.0);
}

/// An end that announces somebody else's address: he gets nothing but small questions, and
/// few of them; nothing suffers.
#[test]
fn nobody_is_sprayed_on_a_peers_word() {
    let (mut sim, q) = planes(80, 1, &[0], &[0], 16);
    let now = sim.now;
    set_planes(&mut sim, 0, &[0], &[]);
    let victims = |from: u8| -> Vec<PlaneAddress> {
        let mut list = vec![PlaneAddress {
            id: 0,
            draining: false,
            gid: gid_on(1, 0),
        }];
        list.extend((1..8).map(|id| PlaneAddress {
            id,
            draining: false,
            gid: gid_on(100 + usize::from(id), from),
        }));
        list
    };
    sim.hosts[1].announce(now, victims(0));
    sim.pump(1);
    let rate = stream_writes(&mut sim, &[q], 64, 100 * MS).rate;
    assert!(rate >= 9_000.0);
    sim.run_for(10 * S);
    let small = |sim: &mut Sim| {
        let strays = std::mem::take(&mut sim.hosts[0].strays);
        for d in &strays {
            let p = Packet::parse(&d.bytes).expect("parses");
            assert!(matches!(p.body(), Body::Probe(_)), "{:?}", p.body());
            assert_eq!(d.bytes.len(), 40);
        }
        strays.len()
    };
    let n = small(&mut sim);
    println!("{n} small questions in 10 s");
    assert!(n > 7 && n <= 7 * 16);
    // New addresses all the time.
    for k in 0..200u8 {
        let now = sim.now;
        sim.hosts[1].announce(now, victims(k));
        sim.pump(1);
        sim.run_for(5 * MS);
    }
    let n = small(&mut sim);
    println!("{n} small questions in a second of ever new addresses");
    assert!(n <= 1000);
    // Nothing was lost by all that.
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    assert!(rate >= 9_000.0);
    assert_eq!(paths_by_plane(&mut sim, q), [16]);
}

/// A plane through which small packets pass and full ones do not gets no paths.
#[test]
fn small_packets_do_not_prove_a_plane() {
    let mut sim = hosts(85, 8);
    sim.fabric.planes = 2;
    sim.fabric.spines(0, 1, 2, &link());
    for pair in [(0, 1), (1, 0)] {
        sim.fabric.link(pair.0, pair.1, 1).mtu = 1500;
    }
    for h in 0..2 {
        sim.hosts[h].skip_crc = true;
        sim.hosts[h].set_planes(0, &[0, 1], &[]);
    }
    let (q, _) = sim.connect(0, 1, &QpSetup::default());
    sim.run_for(2 * S);
    assert_eq!(paths_by_plane(&mut sim, q), [8]);
    for pair in [(0, 1), (1, 0)] {
        sim.fabric.link(pair.0, pair.1, 1).mtu = 0;
    }
    sim.run_for(5 * S);
    assert_eq!(paths_by_plane(&mut sim, q), [4, 4]);
}

/// A host that starts anew announces its planes anew.
#[test]
fn after_a_restart() {
    let (mut sim, q) = planes(90, 4, &all(4), &all(4), 16);
    stream_writes(&mut sim, &[q], 8, MS);
    drain(&mut sim, &[q], 100 * MS);
    sim.hosts[1].restart();
    sim.hosts[1].register(RKEY, BASE, 1 << 24);
    let (q, _) = sim.connect(0, 1, &QpSetup::default());
    sim.run_for(500 * MS);
    assert_eq!(paths_by_plane(&mut sim, q), [4, 4, 4, 4]);
    let rate = stream_writes(&mut sim, &[q], 64, 5 * MS).rate;
    assert!(rate >= 0.9 * 4.0 * 9_500.0);
}

/// Planes die, return, are added, drain and are removed at random, on either end, with loss;
/// at least one that both have works. Every Write arrives, and none fails.
#[test]
fn random() {
    let seeds = match std::env::var("SEED") {
        Ok(s) => {
            let s: u64 = s.parse().expect("a number");
            s..s + 1
        }
        Err(_) => 1000..1006,
    };
    for seed in seeds {
        random_run(seed);
    }
}

fn random_run(seed: u64) {
    let mut rng = metaroce_sim::Rng::new(seed ^ 0x91a);
    let n = 2 + rng.below(4) as usize;
    let paths = [2, 4, 16, 64][rng.below(4) as usize];
    let (mut sim, q) = planes(seed, n, &all(n), &all(n), paths);
    sim.fabric.routed = rng.below(2) == 0;
    if rng.below(2) == 0 {
        for pair in [(0, 1), (1, 0)] {
            sim.fabric.each(pair.0, pair.1, |l| l.loss = 5_000);
        }
    }
    let len = 9000;
    let mut posted = 0u64;
    let mut expected = std::collections::HashMap::new();
    let mut kept = 0;
    let mut has = [all(n), all(n)];
    let mut worst: Time = 0;
    for step in 0..40 {
        if step % 2 == 0 {
            // The next plane that is left alone: both ends have time to learn of it.
            let next = rng.below(n as u64) as usize;
            sim.fabric.set_plane(0, 1, next, true);
            for (h, has) in has.iter_mut().enumerate() {
                has.retain(|p| usize::from(*p) != next);
                has.push(next as u8);
                has.sort_unstable();
                let ids = has.clone();
                set_planes(&mut sim, h, &ids, &[]);
            }
            sim.run_for(300 * MS);
            kept = next;
        } else {
            for p in (0..n).filter(|p| *p != kept) {
                sim.fabric.set_plane(0, 1, p, rng.below(3) != 0);
            }
            for (h, has) in has.iter_mut().enumerate() {
                if rng.below(2) == 0 {
                    let ids: Vec<u8> = (0..n as u8)
                        .filter(|p| usize::from(*p) == kept || rng.below(3) != 0)
                        .collect();
                    let drains: Vec<u8> = (ids.iter().copied())
                        .filter(|p| usize::from(*p) != kept && rng.below(4) == 0)
                        .collect();
                    set_planes(&mut sim, h, &ids, &drains);
                    *has = ids;
                }
            }
        }
        let end = sim.now + MS + rng.below(40 * MS);
        let mut last = sim.now;
        while sim.now < end {
            while sim.hosts[0].qps[q].open() < 8 {
                let slot = posted % 64;
                let data = sim.rng.bytes(len);
                let now = sim.now;
                let va = BASE + slot * len as u64;
                sim.hosts[0]
                    .post(now, q, write(va, RKEY, len), data.clone())
                    .expect("room in the queue");
                expected.insert(slot, data);
                posted += 1;
            }
            sim.pump(0);
            let until = (sim.now + 200 * US).min(end);
            if !sim.step(until) {
                sim.now = until;
            }
            while let Some((h, note)) = sim.notes.pop_front() {
                if let (0, Note::Sent { status, wr, qp }) = (h, note) {
                    assert_eq!(status, Status::Success, "seed {seed} at {}", sim.now);
                    sim.hosts[0].qps[qp].sends.remove(&wr);
                    worst = worst.max(sim.now - last);
                    last = sim.now;
                }
            }
        }
        worst = worst.max(sim.now - last);
    }
    drain(&mut sim, &[q], 2 * S);
    sim.run_for(10 * MS);
    for (slot, data) in expected {
        let at = slot as usize * len;
        assert!(sim.hosts[1].memory[&RKEY].data[at..at + len] == data[..]);
    }
    let c = sim.hosts[0].connection(q);
    println!(
        "seed {seed}: {posted} Writes, {n} planes, {paths} paths, longest pause {} us, {:?}",
        worst / US,
        c.counters()
    );
    // All back: everything is used again.
    for h in 0..2 {
        set_planes(&mut sim, h, &all(n), &[]);
    }
    for p in 0..n {
        sim.fabric.set_plane(0, 1, p, true);
    }
    sim.run_for(6 * S);
    let by_plane = paths_by_plane(&mut sim, q);
    assert_eq!(by_plane.len(), n, "{by_plane:?}");
    let c = sim.hosts[0].connection(q);
    assert!(c.paths().all(|p| p.health == Health::Good));
}
