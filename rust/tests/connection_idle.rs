// SPDX-License-Identifier: GPL-2.0

//! Idle connections close and open again, and nobody above notices. Devices that go say so.

#![forbid(unsafe_code)]

mod common;

use common::{drain, hosts, stream_writes, Nobody, BASE, RKEY};
use metaroce::proto::api::{RxInfo, Status, WrOp};
use metaroce::proto::connection::ConnectionState;
use metaroce::proto::connection::ConnectionState::{Resting, Up};
use metaroce::proto::wire::{Drop, Packet};
use metaroce_sim::{wr, write, Link, QpSetup, Rng, Sim, MS, S, US};

/// Two hosts whose connections rest after 200 ms, with a QP pair whose connection is up. Its
/// streams stay listed for a timer for 4 s.
fn idlers(seed: u64) -> (Sim, usize, usize) {
    idlers_with(seed, &QpSetup::default())
}

/// The same with a QP pair of another kind.
fn idlers_with(seed: u64, setup: &QpSetup) -> (Sim, usize, usize) {
    let mut sim = hosts(seed, 16);
    for h in &mut sim.hosts {
        h.config.idle = 200 * MS;
    }
    sim.fabric.spines(0, 1, 4, &Link::new(1_000_000, 20 * US));
    let (a, b) = sim.connect(0, 1, setup);
    (sim, a, b)
}

fn states(sim: &mut Sim) -> [ConnectionState; 2] {
    [0, 1].map(|h| sim.hosts[h].connection_at(0).expect("there").state())
}

fn lives(sim: &mut Sim) -> [u64; 2] {
    [0, 1].map(|h| {
        let c = sim.hosts[h].connection_at(0).expect("there");
        c.counters().established
    })
}

fn packets(sim: &mut Sim) -> u64 {
    let mut n = 0;
    for way in [(0, 1), (1, 0)] {
        sim.fabric.each(way.0, way.1, |l| n += l.stats.packets);
    }
    n
}

/// A Write from host `h` arrives, and a Send, which takes the next receive in order.
fn exchange(sim: &mut Sim, h: usize, qps: [usize; 2]) {
    let (now, mine, other) = (sim.now, qps[h], qps[1 - h]);
    let data = sim.rng.bytes(9_000);
    let host = &mut sim.hosts[h];
    host.post(now, mine, write(BASE, RKEY, 9_000), data.clone())
        .expect("room");
    host.post(now, mine, wr(WrOp::Send, 9_000), data.clone())
        .expect("room");
    sim.hosts[1 - h].post_receive(now, other, 9_000);
    sim.pump(1 - h);
    sim.pump(h);
    let end = sim.now + S;
    while sim.hosts[h].qps[mine].open() > 0 {
        assert!(sim.step(end), "work is left");
    }
    let receiver = &sim.hosts[1 - h];
    assert!(receiver.memory[&RKEY].data[..9_000] == data);
    let last = receiver.qps[other].receives.last().expect("posted");
    assert!(last.done && last.data == data);
    for (i, c) in sim.hosts[h].qps[mine].completions.iter().enumerate() {
        assert_eq!((c.wr, c.status), (i as u32, Status::Success));
    }
}

#[test]
fn idle_connections_rest_and_come_back() {
    let (mut sim, a, b) = idlers(1);
    exchange(&mut sim, 0, [a, b]);
    for round in 0..4u64 {
        sim.run_for(450 * MS);
        assert_eq!(states(&mut sim), [Resting; 2], "round {round}");
        // Timers that were set before have gone off once they are through.
        sim.run_for(5 * S);
        let before = (packets(&mut sim), sim.hosts[0].timers + sim.hosts[1].timers);
        sim.run_for(60 * S);
        let after = (packets(&mut sim), sim.hosts[0].timers + sim.hosts[1].timers);
        assert_eq!(before, after, "one that rests does nothing");
        exchange(&mut sim, (round % 2) as usize, [a, b]);
        assert_eq!(states(&mut sim), [Up; 2]);
        assert_eq!(lives(&mut sim), [2 + round; 2]);
    }
    assert!(sim
        .hosts
        .iter()
        .all(|h| h.qps.iter().all(|q| q.error.is_none())));
    let c = sim.hosts[0].connection(a).counters();
    assert_eq!(c.rests, 4);
}

#[test]
fn used_connections_do_not_rest() {
    let (mut sim, a, b) = idlers(2);
    for _ in 0..20 {
        exchange(&mut sim, 0, [a, b]);
        sim.run_for(150 * MS);
    }
    assert_eq!(states(&mut sim), [Up; 2]);
    assert_eq!(lives(&mut sim), [1; 2]);
    // Work that cannot be done yet is work: a Send that nobody takes.
    let now = sim.now;
    for _ in 0..2 {
        sim.hosts[0]
            .post(now, a, wr(WrOp::Send, 10), vec![1; 10])
            .expect("room");
    }
    sim.pump(0);
    sim.run_for(2 * S);
    assert_eq!(states(&mut sim), [Up; 2]);
    for _ in 0..2 {
        let now = sim.now;
        sim.hosts[1].post_receive(now, b, 10);
    }
    sim.pump(1);
    drain(&mut sim, &[a], S);
}

/// A Send waits for a receive, in silence that is longer than what makes a connection idle: it is
/// outstanding nevertheless.
#[test]
fn long_waits_are_no_idleness() {
    let setup = QpSetup {
        min_rnr_timer_us: 655_360,
        ..QpSetup::default()
    };
    let (mut sim, a, b) = idlers_with(9, &setup);
    exchange(&mut sim, 0, [a, b]);
    let now = sim.now;
    sim.hosts[0]
        .post(now, a, wr(WrOp::Send, 10), vec![1; 10])
        .expect("room");
    sim.pump(0);
    for _ in 0..60 {
        sim.run_for(50 * MS);
        assert_eq!(states(&mut sim), [Up; 2]);
    }
    let rests = |sim: &mut Sim, h: usize| {
        let c = sim.hosts[h].connection_at(0).expect("there");
        c.counters().rests
    };
    assert_eq!([rests(&mut sim, 0), rests(&mut sim, 1)], [0; 2]);
    let now = sim.now;
    sim.hosts[1].post_receive(now, b, 10);
    sim.pump(1);
    drain(&mut sim, &[a], 2 * S);
}

/// The word that the peer agrees gets lost, every time: one end rests, the other one does not know.
/// Whoever has something to send, the numbers go on where they were.
#[test]
fn one_end_does_not_know() {
    for who in 0..2 {
        let (mut sim, a, b) = idlers(3);
        exchange(&mut sim, 0, [a, b]);
        sim.run_for(20 * MS);
        sim.fabric.each(1, 0, |l| l.alive = false);
        let end = sim.now + S;
        while states(&mut sim)[1] != Resting {
            assert!(sim.step(end));
        }
        sim.run_for(S);
        assert_eq!(
            states(&mut sim),
            [Up, Resting],
            "it closes by agreement alone"
        );
        sim.fabric.each(1, 0, |l| l.alive = true);
        exchange(&mut sim, who, [a, b]);
        assert_eq!(lives(&mut sim), [1; 2], "who {who}");
        assert_eq!(states(&mut sim), [Up; 2]);
        sim.run_for(600 * MS);
        assert_eq!(states(&mut sim), [Resting; 2]);
    }
}

/// Both ends post at the moment at which they agree to close.
#[test]
fn posts_cross_the_agreement() {
    for seed in 0..60 {
        let (mut sim, a, b) = idlers(seed);
        let mut rng = Rng::new(seed);
        exchange(&mut sim, 0, [a, b]);
        for h in 0..2 {
            let c = sim.hosts[h].connection_at(0).expect("there");
            assert_eq!(c.state(), Up);
        }
        for way in [(0, 1), (1, 0)] {
            sim.fabric
                .each(way.0, way.1, |l| (l.loss, l.duplicate) = (100_000, 200_000));
        }
        let end = sim.now + 2 * S;
        let before = packets(&mut sim);
        while packets(&mut sim) == before {
            assert!(sim.step(end));
        }
        // It has begun.
        let first = rng.below(2) as usize;
        let wait = rng.below(150 * US);
        sim.run_for(wait);
        for h in [first, 1 - first] {
            exchange(&mut sim, h, [a, b]);
            let wait = rng.below(50 * US);
            sim.run_for(wait);
        }
        sim.run_for(3 * S);
        assert_eq!(states(&mut sim), [Resting; 2]);
    }
}

/// The peer starts anew while the connection rests: that shows when something is posted.
#[test]
fn the_peer_restarts_meanwhile() {
    let (mut sim, a, b) = idlers(5);
    exchange(&mut sim, 0, [a, b]);
    sim.run_for(S);
    assert_eq!(states(&mut sim), [Resting; 2]);
    sim.hosts[1].restart();
    sim.hosts[1].register(RKEY, BASE, 1 << 20);
    let setup = QpSetup::default();
    let now = sim.now;
    sim.hosts[0]
        .post(now, a, write(BASE, RKEY, 100), vec![1; 100])
        .expect("room");
    // Another QP of this host meets one of the new life.
    let (c, _) = sim.connect(0, 1, &setup);
    sim.hosts[0]
        .post(now, c, write(BASE, RKEY, 100), vec![2; 100])
        .expect("room");
    sim.pump(0);
    sim.run_for(2 * S);
    let q = &sim.hosts[0].qps[a];
    let last = q.completions.last().expect("done");
    assert_eq!(last.status, Status::RetryExceeded);
    assert!(q.error.is_some());
    assert_eq!(sim.hosts[0].qps[c].completions[0].status, Status::Success);
}

/// QPs leave a connection that rests: it closes in its time and says nothing.
#[test]
fn the_last_qp_leaves_one_that_rests() {
    let (mut sim, a, b) = idlers(6);
    stream_writes(&mut sim, &[a], 4, 5 * MS);
    drain(&mut sim, &[a], S);
    sim.run_for(S);
    assert_eq!(states(&mut sim), [Resting; 2]);
    let before = packets(&mut sim);
    let now = sim.now;
    sim.hosts[0].destroy(now, a);
    sim.hosts[1].destroy(now, b);
    sim.pump(0);
    sim.pump(1);
    sim.run_for(10 * S);
    assert_eq!(packets(&mut sim), before);
    for h in 0..2 {
        assert!(sim.hosts[h].connection_at(0).is_none());
    }
}

/// Who knows nothing of a connection but where it is answers for nobody: a Close with another id
/// than the receiver's changes nothing, one with the right id lets an idle end rest.
#[test]
fn a_close_for_another_id_changes_nothing() {
    let (mut sim, a, b) = idlers(8);
    exchange(&mut sim, 0, [a, b]);
    sim.run_for(20 * MS);
    let now = sim.now;
    let core = sim.hosts[0].connection(a);
    let id = core.ids().local_cid;
    // The bits by which a driver may find the connection, and others; the last one is its own.
    for id in [id ^ 1 << 63, id ^ 1 << 20, !id, id.swap_bytes(), id] {
        let own = id == core.ids().local_cid;
        for kind in [2u32, 0, 1] {
            let mut bytes = vec![0u8; 24];
            bytes[0] = 5;
            bytes[3] = 24;
            bytes[8..16].copy_from_slice(&id.to_be_bytes());
            bytes[16..20].copy_from_slice(&kind.to_be_bytes());
            let packet = Packet::parse(&bytes).expect("a Close");
            let info = RxInfo {
                ce: false,
                plane: 0,
                payload_len: 0,
            };
            let got = core.receive(now, &packet, &info, &mut Nobody);
            if own {
                assert!(got.is_ok());
            } else {
                assert!(matches!(got, Err(Drop::NoConnection)));
                assert_eq!(core.state(), Up, "kind {kind}");
            }
        }
    }
    assert_eq!(core.state(), Resting);
    sim.pump(0);
    exchange(&mut sim, 1, [a, b]);
}

/// A device that goes says so: a peer without QPs parts at once, one with QPs
/// rests until it has something to send.
#[test]
fn a_device_goes() {
    for with_qp in [false, true] {
        let (mut sim, a, b) = idlers(7);
        exchange(&mut sim, 0, [a, b]);
        let now = sim.now;
        if !with_qp {
            sim.hosts[0].destroy(now, a);
            sim.pump(0);
        }
        sim.hosts[1].destroy(now, b);
        sim.pump(1);
        sim.run_for(MS);
        let now = sim.now;
        sim.hosts[1].close_all(now);
        sim.pump(1);
        sim.run_for(MS);
        assert!(sim.hosts[1].connection_at(0).is_none());
        match sim.hosts[0].connection_at(0).map(|c| c.state()) {
            None => assert!(!with_qp),
            Some(state) => assert!(with_qp && state == Resting, "{state:?}"),
        }
    }
}

/// Send records of both ends.
fn records(sim: &mut Sim) -> [usize; 2] {
    [0, 1].map(|h| sim.hosts[h].connection_at(0).expect("there").records())
}

#[test]
fn records_are_given_back_at_rest() {
    let mut sim = hosts(4, 4);
    for h in &mut sim.hosts {
        h.config.idle = 200 * MS;
        h.config.path_records = 16;
    }
    sim.fabric.spines(0, 1, 4, &Link::new(40_000_000, 20 * US));
    let (a, b) = sim.connect(0, 1, &QpSetup::default());
    assert_eq!(records(&mut sim), [16; 2]);
    for round in 0..3 {
        stream_writes(&mut sim, &[a], 64, 5 * MS);
        drain(&mut sim, &[a], S);
        let grown = records(&mut sim);
        assert!(grown[0] > 16, "round {round}: {grown:?}");
        // While it is used, it keeps them.
        sim.run_for(90 * MS);
        exchange(&mut sim, 0, [a, b]);
        assert_eq!(records(&mut sim)[0], grown[0], "round {round}");
        sim.run_for(450 * MS);
        assert_eq!(states(&mut sim), [Resting; 2], "round {round}");
        assert_eq!(records(&mut sim), [16; 2], "round {round}");
    }
}
