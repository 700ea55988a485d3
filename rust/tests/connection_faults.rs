// SPDX-License-Identifier: GPL-2.0

//! Links that die and come back, hosts that restart, queues that are full.

#![forbid(unsafe_code)]

mod common;

use common::{drain, hosts, pair, print_counters, spines, stream_writes, BASE, RKEY};
use metaroce::proto::api::{ConnectionError, Event, Status};
use metaroce::proto::congestion::Shares;
use metaroce::proto::connection::{ConnectionState, Health};
use metaroce_sim::{write, Host, Link, Note, QpSetup, Sim, MS, S, US};

#[test]
fn a_cut_spine_loses_nothing_and_traffic_returns() {
    for (seed, n, paths) in [(11, 2, 16), (12, 4, 64), (13, 2, 4)] {
        let link = Link::new(400_000, 50 * US);
        let (mut sim, _, qa) = spines(seed, &link, n, paths);
        let before = stream_writes(&mut sim, &[qa], 32, 300 * MS);
        let share: Vec<_> = (0..n)
            .map(|i| sim.fabric.link(0, 1, i).stats.bytes)
            .collect();
        println!("shares {share:?}");
        // Both directions, as when a switch dies.
        sim.fabric.link(0, 1, 0).alive = false;
        sim.fabric.link(1, 0, 0).alive = false;
        let dead = sim.fabric.link(0, 1, 0).stats.packets;
        let during = stream_writes(&mut sim, &[qa], 32, 500 * MS);
        print_counters(&mut sim, qa);
        assert!(
            during.pause < 60 * MS,
            "pause of {} us",
            during.pause / 1000
        );
        let left = (n - 1) as f64 / n as f64;
        assert!(
            during.rate > before.rate * left * 0.8,
            "{} of {}",
            during.rate,
            before.rate
        );
        assert_eq!(sim.fabric.link(0, 1, 0).stats.packets, dead);
        sim.fabric.link(0, 1, 0).alive = true;
        sim.fabric.link(1, 0, 0).alive = true;
        sim.run_for(2 * S);
        let bytes = sim.fabric.link(0, 1, 0).stats.bytes;
        let after = stream_writes(&mut sim, &[qa], 32, 500 * MS);
        assert!(after.rate > before.rate * 0.9);
        assert!(sim.fabric.link(0, 1, 0).stats.bytes - bytes > 1 << 20);
        assert!(sim.hosts[0]
            .connection(qa)
            .paths()
            .all(|p| p.health == Health::Good));
        drain(&mut sim, &[qa], S);
    }
}

/// One port is dead, and now and then everything is for a moment. The path must leave its port
/// all the same: what is known about it does not change because others are silent as well.
#[test]
fn a_dead_port_is_left_although_others_fall_silent() {
    const PATH: usize = 3;
    let (mut sim, _, qa) = spines(14, &Link::new(400_000, 50 * US), 64, 16);
    stream_writes(&mut sim, &[qa], 8, 50 * MS);
    let path = |sim: &mut Sim| sim.hosts[0].connection(qa).paths().nth(PATH);
    let port = path(&mut sim).expect("a path").port;
    let dead = sim.fabric.spine_of(port, 64);
    sim.fabric.link(0, 1, dead).alive = false;
    for _ in 0..60 {
        stream_writes(&mut sim, &[qa], 8, 3 * MS);
        sim.fabric.each(0, 1, |l| l.alive = false);
        stream_writes(&mut sim, &[qa], 8, 2 * MS);
        sim.fabric.each(0, 1, |l| l.alive = true);
        sim.fabric.link(0, 1, dead).alive = false;
    }
    let p = path(&mut sim).expect("a path");
    println!("{p:?}");
    print_counters(&mut sim, qa);
    assert!(p.failures >= 1, "never left in 300 ms");
    assert_ne!(p.port, port);
    drain(&mut sim, &[qa], S);
}

#[test]
fn one_direction_of_a_spine_dies() {
    for reverse in [false, true] {
        let link = Link::new(400_000, 50 * US);
        let (mut sim, _, qa) = spines(21, &link, 2, 16);
        let before = stream_writes(&mut sim, &[qa], 32, 200 * MS);
        let (x, y) = if reverse { (1, 0) } else { (0, 1) };
        sim.fabric.link(x, y, 1).alive = false;
        let during = stream_writes(&mut sim, &[qa], 32, 500 * MS);
        print_counters(&mut sim, qa);
        assert!(during.rate > before.rate * if reverse { 0.8 } else { 0.4 });
        assert!(during.pause < 60 * MS);
        drain(&mut sim, &[qa], S);
    }
}

#[test]
fn everything_dies_for_a_while() {
    let link = Link::new(400_000, 50 * US);
    let (mut sim, _, qa) = spines(31, &link, 2, 16);
    stream_writes(&mut sim, &[qa], 32, 100 * MS);
    for way in [(0, 1), (1, 0)] {
        sim.fabric.each(way.0, way.1, |l| l.alive = false);
    }
    sim.run_for(2 * S);
    for way in [(0, 1), (1, 0)] {
        sim.fabric.each(way.0, way.1, |l| l.alive = true);
    }
    let start = sim.now;
    drain(&mut sim, &[qa], S);
    println!("caught up within {} ms", (sim.now - start) / MS);
    let after = stream_writes(&mut sim, &[qa], 32, 200 * MS);
    assert!(after.rate > 600.0);
}

#[test]
fn reordering_and_duplicates_are_not_loss() {
    let mut link = Link::new(400_000, 100 * US);
    link.reorder = 100_000;
    link.reorder_by = 300 * US;
    link.duplicate = 20_000;
    let (mut sim, _, qa) = pair(41, &link);
    let flow = stream_writes(&mut sim, &[qa], 64, S);
    print_counters(&mut sim, qa);
    assert!(flow.rate > 360.0);
    let c = *sim.hosts[0].connection(qa).counters();
    assert!(
        c.retransmits * 10 < c.sent_packets,
        "{} of {} sent again",
        c.retransmits,
        c.sent_packets
    );
    drain(&mut sim, &[qa], S);
}

#[test]
fn corruption_is_loss() {
    let mut link = Link::new(400_000, 100 * US);
    link.corrupt = 20_000;
    let (mut sim, _, qa) = pair(42, &link);
    let flow = stream_writes(&mut sim, &[qa], 64, 300 * MS);
    assert!(flow.rate > 360.0);
    assert!(sim.hosts[1].crc_errors > 50);
    drain(&mut sim, &[qa], S);
}

#[test]
fn a_small_drop_tail_queue_is_used_well() {
    for limit in [8, 20, 100] {
        let mut link = Link::new(400_000, 100 * US);
        link.limit = limit;
        let (mut sim, _, qa) = pair(51, &link);
        let flow = stream_writes(&mut sim, &[qa], 64, S);
        let s = sim.fabric.link(0, 1, 0).stats;
        println!("limit {limit}: {s:?}");
        print_counters(&mut sim, qa);
        assert!(flow.rate > 330.0, "{}", flow.rate);
        // Eight packets are half of what the sixteen paths want to try.
        assert!(s.overflow * 4 < s.packets);
    }
}

#[test]
fn marks_keep_the_queue_short() {
    let mut link = Link::new(1_000_000, 50 * US);
    link.mark = 20;
    let (mut sim, _, qa) = pair(52, &link);
    stream_writes(&mut sim, &[qa], 64, 200 * MS);
    sim.fabric.link(0, 1, 0).stats.longest = 0;
    let flow = stream_writes(&mut sim, &[qa], 64, S);
    let s = sim.fabric.link(0, 1, 0).stats;
    println!("{s:?}");
    print_counters(&mut sim, qa);
    assert!(flow.rate > 900.0);
    assert!(s.longest < 60, "queue of {}", s.longest);
    assert_eq!(s.overflow, 0);
}

#[test]
fn a_full_local_queue_is_no_loss() {
    let (mut sim, _, qa) = pair(61, &Link::new(1_000_000, 20 * US));
    sim.hosts[0].refuse = 50_000;
    sim.hosts[1].refuse = 50_000;
    let flow = stream_writes(&mut sim, &[qa], 32, 300 * MS);
    print_counters(&mut sim, qa);
    assert!(flow.rate > 500.0);
    assert!(sim.hosts[0].refused > 100);
    assert_eq!(sim.hosts[0].connection(qa).counters().window_cuts, 0);
    drain(&mut sim, &[qa], S);
}

#[test]
fn full_packets_that_do_not_pass_get_smaller() {
    let mut link = Link::new(400_000, 100 * US);
    link.mtu = 1500;
    let (mut sim, _, qa) = pair(71, &link);
    let flow = stream_writes(&mut sim, &[qa], 32, 2 * S);
    print_counters(&mut sim, qa);
    assert!(sim.hosts[0].connection(qa).payload_mtu() < 1500);
    assert!(flow.done > 100);
    drain(&mut sim, &[qa], 5 * S);
}

#[test]
fn a_late_peer_is_waited_for() {
    let mut sim = hosts(81, 16);
    sim.fabric.direct(0, 1, &Link::new(1_000_000, 10 * US));
    let setup = QpSetup::default();
    let qa = sim.hosts[0].make_qp(&setup);
    let qb = sim.hosts[1].make_qp(&setup);
    let (na, nb) = (sim.hosts[0].qps[qa].qpn, sim.hosts[1].qps[qb].qpn);
    let now = sim.now;
    sim.hosts[0].ready(now, qa, 1, nb, 5, 9, &setup);
    sim.hosts[0]
        .post(now, qa, write(BASE, RKEY, 100), vec![3; 100])
        .unwrap();
    sim.pump(0);
    sim.run_for(2 * S);
    assert!(sim.hosts[0].qps[qa].completions.is_empty());
    let now = sim.now;
    sim.hosts[1].ready(now, qb, 0, na, 9, 5, &setup);
    sim.pump(1);
    sim.run_for(10 * MS);
    assert_eq!(sim.hosts[0].qps[qa].completions.len(), 1);
    // A second QP whose peer is late, on a connection that is up.
    let qa = sim.hosts[0].make_qp(&setup);
    let qb = sim.hosts[1].make_qp(&setup);
    let (na, nb) = (sim.hosts[0].qps[qa].qpn, sim.hosts[1].qps[qb].qpn);
    let now = sim.now;
    sim.hosts[0].ready(now, qa, 1, nb, 7, 8, &setup);
    sim.hosts[0]
        .post(now, qa, write(BASE, RKEY, 100), vec![3; 100])
        .unwrap();
    sim.pump(0);
    sim.run_for(300 * MS);
    assert!(sim.hosts[0].qps[qa].completions.is_empty());
    let now = sim.now;
    sim.hosts[1].ready(now, qb, 0, na, 8, 7, &setup);
    sim.pump(1);
    let start = sim.now;
    drain(&mut sim, &[qa], S);
    println!("{} us after RTR", (sim.now - start) / US);
    assert!(sim.now - start < 20 * MS);
    assert_eq!(sim.hosts[0].qps[qa].completions[0].status, Status::Success);
}

#[test]
fn an_unreachable_peer_ends_in_retry_exceeded() {
    let mut sim = hosts(82, 16);
    let mut link = Link::new(1_000_000, 10 * US);
    link.alive = false;
    sim.fabric.direct(0, 1, &link);
    let setup = QpSetup {
        timeout: 50 * MS,
        retry_cnt: 2,
        ..QpSetup::default()
    };
    let (qa, _) = sim.connect(0, 1, &setup);
    let now = sim.now;
    sim.hosts[0]
        .post(now, qa, write(BASE, RKEY, 100), vec![3; 100])
        .unwrap();
    sim.pump(0);
    sim.run_for(S);
    let c = sim.hosts[0].qps[qa].completions[0];
    assert_eq!(c.status, Status::RetryExceeded);
    assert!((150 * MS..300 * MS).contains(&(c.at - now)));
}

#[test]
fn a_machine_that_stood_still_blames_nobody() {
    let mut sim = hosts(87, 16);
    sim.fabric.direct(0, 1, &Link::new(1_000_000, 10 * US));
    let setup = QpSetup {
        timeout: 20 * MS,
        retry_cnt: 2,
        ..QpSetup::default()
    };
    let (qa, _) = sim.connect(0, 1, &setup);
    for _ in 0..10 {
        let now = sim.now;
        sim.hosts[0]
            .post(now, qa, write(BASE, RKEY, 100), vec![3; 100])
            .unwrap();
        sim.pump(0);
        sim.hosts[0].stalled_until = now + 500 * MS;
        sim.run_for(600 * MS);
    }
    drain(&mut sim, &[qa], S);
    let c = &sim.hosts[0].qps[qa].completions;
    assert!(c.iter().all(|c| c.status == Status::Success), "{c:?}");
}

#[test]
fn the_peer_restarts() {
    let (mut sim, _, qa) = pair(83, &Link::new(1_000_000, 10 * US));
    stream_writes(&mut sim, &[qa], 8, 20 * MS);
    sim.hosts[1].restart();
    sim.run_for(300 * MS);
    // Nobody there yet: the old connection waits.
    assert!(sim.hosts[0].qps[qa].error.is_none());
    sim.hosts[1].register(RKEY, BASE, 1 << 24);
    let (qa2, _) = sim.connect(0, 1, &QpSetup::default());
    sim.run_for(200 * MS);
    assert_eq!(
        Host::failed(&sim.notes),
        Some(ConnectionError::PeerRestarted)
    );
    assert!(sim.hosts[0].qps[qa].error.is_some());
    let c = &sim.hosts[0].qps[qa].completions;
    assert!(c.iter().any(|c| c.status == Status::RetryExceeded));
    assert_eq!(sim.hosts[0].qps[qa2].error, None, "the new QP lives");
    let flow = stream_writes(&mut sim, &[qa2], 8, 100 * MS);
    assert!(flow.rate > 500.0);
}

#[test]
fn the_last_acknowledgement_is_lost_and_the_peer_is_gone() {
    let (mut sim, _, qa) = pair(84, &Link::new(1_000_000, 10 * US));
    let now = sim.now;
    sim.fabric.each(1, 0, |l| l.alive = false);
    sim.hosts[0]
        .post(now, qa, write(BASE, RKEY, 100), vec![3; 100])
        .unwrap();
    sim.pump(0);
    sim.run_for(100 * US);
    assert!(sim.hosts[0].qps[qa].completions.is_empty());
    let now = sim.now;
    sim.hosts[1].destroy(now, 0);
    sim.pump(1);
    sim.run_for(50 * MS);
    sim.fabric.each(1, 0, |l| l.alive = true);
    drain(&mut sim, &[qa], S);
    assert_eq!(sim.hosts[0].qps[qa].completions[0].status, Status::Success);
}

#[test]
fn connections_end_when_nobody_needs_them() {
    let (mut sim, _, qa) = pair(85, &Link::new(1_000_000, 10 * US));
    stream_writes(&mut sim, &[qa], 4, 10 * MS);
    drain(&mut sim, &[qa], S);
    let now = sim.now;
    sim.hosts[0].destroy(now, qa);
    sim.pump(0);
    sim.run_for(10 * S);
    // The peer has a QP: it stays.
    assert!(sim.hosts[0].connection_at(0).is_some());
    assert_eq!(
        sim.hosts[1].connection_at(0).map(|c| c.state()),
        Some(ConnectionState::Up)
    );
    let now = sim.now;
    sim.hosts[1].destroy(now, 0);
    sim.pump(1);
    sim.run_for(20 * S);
    assert!(sim.hosts[0].connection_at(0).is_none());
    assert!(sim.hosts[1].connection_at(0).is_none());
    // And it comes again.
    let (qa, _) = sim.connect(0, 1, &QpSetup::default());
    sim.run_for(10 * MS);
    let flow = stream_writes(&mut sim, &[qa], 8, 50 * MS);
    assert!(flow.rate > 500.0);
}

#[test]
fn a_connection_with_itself() {
    let mut sim = Sim::new(86);
    let h = sim.add_host();
    sim.hosts[h].register(RKEY, BASE, 1 << 24);
    let (q1, q2) = sim.connect(h, h, &QpSetup::default());
    let data = sim.rng.bytes(100_000);
    let now = sim.now;
    sim.hosts[h]
        .post(now, q1, write(BASE, RKEY, 100_000), data.clone())
        .unwrap();
    sim.hosts[h]
        .post(
            now,
            q2,
            write(BASE + (1 << 20), RKEY, 100_000),
            data.clone(),
        )
        .unwrap();
    sim.pump(h);
    sim.run_for(10 * MS);
    assert_eq!(sim.hosts[h].qps[q1].completions.len(), 1);
    assert_eq!(sim.hosts[h].qps[q2].completions.len(), 1);
    assert_eq!(sim.hosts[h].memory[&RKEY].data[..100_000], data[..]);
    assert!(!sim
        .notes
        .iter()
        .any(|(_, n)| matches!(n, Note::Other(Event::PathChanged { .. }))));
}

#[test]
fn many_streams_share_alike() {
    let link = Link::new(1_000_000, 20 * US);
    let (mut sim, _, _) = pair(91, &link);
    let qps: Vec<_> = (0..16)
        .map(|_| sim.connect(0, 1, &QpSetup::default()).0)
        .collect();
    sim.run_for(5 * MS);
    stream_writes(&mut sim, &qps, 4, 300 * MS);
    let counts: Vec<_> = qps
        .iter()
        .map(|q| sim.hosts[0].qps[*q].completions.len())
        .collect();
    println!("{counts:?}");
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(most - least <= 2 + most / 10);
    drain(&mut sim, &qps, S);
}

/// Several senders to one receiver behind a link of 1 Gbit/s: rates, longest queue, drops.
fn incast(shares: bool, mark: usize) -> (Vec<f64>, usize, u64) {
    let senders = 8;
    let mut sim = Sim::new(92);
    for _ in 0..=senders {
        let h = sim.add_host();
        sim.hosts[h].register(RKEY, BASE, 1 << 24);
    }
    let mut last = Link::new(1_000_000, 10 * US);
    last.limit = 300;
    last.mark = mark;
    sim.fabric.last_hop(0, &last);
    if shares {
        sim.hosts[0].shares = Shares::new(1_000_000, 64).ok();
    }
    let qps: Vec<_> = (1..=senders)
        .map(|h| {
            sim.fabric.direct(0, h, &Link::new(10_000_000, 10 * US));
            (h, sim.connect(h, 0, &QpSetup::default()).0)
        })
        .collect();
    sim.run_for(10 * MS);
    let len = 65536;
    let mut done = vec![0u64; senders];
    let (start, end) = (sim.now, sim.now + 300 * MS);
    loop {
        for &(h, q) in &qps {
            while sim.hosts[h].qps[q].open() < 8 {
                let now = sim.now;
                sim.hosts[h]
                    .post(now, q, write(BASE, RKEY, len), vec![h as u8; len])
                    .unwrap();
            }
            sim.pump(h);
        }
        if !sim.step(end) {
            break;
        }
        if sim.now < start + 100 * MS {
            sim.fabric.last_link(0).stats = Default::default();
            sim.notes.clear();
        }
        while let Some((h, n)) = sim.notes.pop_front() {
            if matches!(n, Note::Sent { .. }) {
                done[h - 1] += 1;
            }
        }
    }
    let rates: Vec<_> = done
        .iter()
        .map(|d| (d * len as u64 * 8) as f64 * 1000.0 / (200 * MS) as f64)
        .collect();
    let s = sim.fabric.last_link(0).stats;
    println!("shares {shares}, marks {mark}: {rates:.0?} {s:?}");
    (rates, s.longest, s.overflow)
}

#[test]
fn eight_senders_to_one() {
    let least = |r: &[f64]| r.iter().copied().fold(f64::MAX, f64::min);
    let total = |r: &[f64]| r.iter().sum::<f64>();
    // Nothing but a queue that drops.
    let (r, _, _) = incast(false, 0);
    assert!(total(&r) > 850.0 && least(&r) > 30.0);
    // Marks.
    let (r, _, overflow) = incast(false, 30);
    assert!(total(&r) > 900.0 && least(&r) > 60.0 && overflow == 0);
    // The receiver's shares alone keep the queue short.
    let (r, longest, overflow) = incast(true, 0);
    assert!(total(&r) > 850.0 && least(&r) > 80.0 && overflow == 0);
    assert!(longest < 150, "queue of {longest}");
}
