// SPDX-License-Identifier: GPL-2.0

//! A connection on good and on lossy links.

#![forbid(unsafe_code)]

mod common;

use common::{hosts, pair, print_counters, stream_writes, BASE, RKEY};
use metaroce::proto::api::Status;
use metaroce_sim::{write, Link, QpSetup, MS, S, US};

#[test]
fn one_write_is_one_packet_and_one_ack() {
    let (mut sim, a, qa) = pair(1, &Link::new(10_000_000, 5 * US));
    for round in 0..10u64 {
        let count = |sim: &mut metaroce_sim::Sim, x, y| sim.fabric.link(x, y, 0).stats.packets;
        let before = (count(&mut sim, 0, 1), count(&mut sim, 1, 0));
        let data = sim.rng.bytes(64);
        let start = sim.now;
        let n = sim.hosts[a]
            .post(start, qa, write(BASE + 64 * round, RKEY, 64), data.clone())
            .expect("room in the queue");
        sim.pump(a);
        sim.run_for(100 * US);
        let c = *sim.hosts[a].qps[qa]
            .completions
            .last()
            .expect("a completion");
        assert_eq!((c.wr, c.status), (n, Status::Success));
        assert!(c.at - start < 16 * US, "took {} ns", c.at - start);
        let at = 64 * round as usize;
        assert_eq!(sim.hosts[1].memory[&RKEY].data[at..at + 64], data[..]);
        sim.run_for(50 * MS);
        let after = (count(&mut sim, 0, 1), count(&mut sim, 1, 0));
        assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1));
    }
}

/// On a path that is longer than what is assumed before anything was measured, replies come when
/// the next question is out already. They count, and packets do not get smaller.
#[test]
fn long_paths_are_heard() {
    for delay in [5 * MS, 15 * MS] {
        let mut sim = hosts(1, 16);
        sim.fabric.spines(0, 1, 4, &Link::new(100_000_000, delay));
        let (qa, _) = sim.connect(0, 1, &QpSetup::default());
        sim.run_for(S);
        for h in 0..2 {
            let c = sim.hosts[h].connection_at(0).expect("there");
            let n = *c.counters();
            println!("{} ms: {n:?}", delay / MS);
            assert_eq!(c.payload_mtu(), 4096, "host {h}");
            assert_eq!((n.path_suspected, n.path_failed), (0, 0), "host {h}");
            // Each path once, a few times before the first reply.
            assert!(n.probe_replies >= 16 && n.probes_sent < 16 * 9, "host {h}");
            assert!(c.paths().all(|p| p.srtt >= 2 * delay), "host {h}");
        }
        let before = sim.hosts[0].connection(qa).counters().probes_sent;
        stream_writes(&mut sim, &[qa], 64, S);
        let probes = sim.hosts[0].connection(qa).counters().probes_sent - before;
        assert!(probes < 100, "{probes} questions in a second");
    }
}

/// The first 64 KiB of a connection leave at once, whatever the packets and paths.
#[test]
fn the_first_64_kib_do_not_wait() {
    for mtu in [640, 1500, 4200, 9000] {
        for paths in [1, 4, 16, 64] {
            let mut sim = hosts(1, paths);
            for h in &mut sim.hosts {
                h.config.netdev_mtu = mtu;
                h.config.path_records = 256;
            }
            sim.fabric.spines(0, 1, 4, &Link::new(100_000_000, 5 * MS));
            let (qa, _) = sim.connect(0, 1, &QpSetup::default());
            sim.run_for(100 * MS);
            let start = sim.now;
            sim.hosts[0]
                .post(start, qa, write(BASE, RKEY, 65536), vec![1; 65536])
                .expect("room in the queue");
            sim.pump(0);
            sim.run_for(50 * MS);
            let done = sim.hosts[0].qps[qa].completions[0];
            assert_eq!(done.status, Status::Success);
            let time = done.at - start;
            assert!(time < 11 * MS, "MTU {mtu}, {paths} paths: {time} ns");
        }
    }
}

/// Writes of 64 bytes, one at a time, for `time`; returns how many, and the longest time that
/// one took.
fn one_by_one(sim: &mut metaroce_sim::Sim, a: usize, qa: usize, time: u64) -> (u64, u64) {
    let data = sim.rng.bytes(64);
    let (end, mut done, mut longest) = (sim.now + time, 0, 0);
    while sim.now < end {
        let start = sim.now;
        let n = sim.hosts[a]
            .post(start, qa, write(BASE, RKEY, 64), data.clone())
            .expect("room in the queue");
        sim.pump(a);
        let late = start + S;
        while sim.hosts[a].qps[qa].sends.contains_key(&n) {
            assert!(sim.step(late), "a Write takes more than a second");
            while let Some((_, note)) = sim.notes.pop_front() {
                if let metaroce_sim::Note::Sent { status, wr, qp } = note {
                    assert_eq!(status, Status::Success);
                    sim.hosts[a].qps[qp].sends.remove(&wr);
                }
            }
        }
        longest = longest.max(sim.now - start);
        done += 1;
    }
    (done, longest)
}

#[test]
fn no_timer_goes_off_for_a_message() {
    let (mut sim, a, qa) = pair(9, &Link::new(10_000_000, 5 * US));
    one_by_one(&mut sim, a, qa, 200 * MS);
    let before = sim.hosts[0].timers;
    let (done, _) = one_by_one(&mut sim, a, qa, S);
    let timers = sim.hosts[0].timers - before;
    println!("{timers} timers for {done} Writes");
    assert!(done > 50_000);
    // The sender looks around each 10 ms. (The receiver's timer is for the acknowledgement
    // of what is being placed, which takes some time here.)
    assert!(timers <= 110);
}

#[test]
fn the_first_lost_packet_costs_some_ms() {
    let (mut sim, a, qa) = pair(10, &Link::new(10_000_000, 5 * US));
    one_by_one(&mut sim, a, qa, 200 * MS);
    for round in 0..20 {
        sim.fabric.link(0, 1, 0).loss = 1_000_000;
        let start = sim.now;
        sim.hosts[a]
            .post(start, qa, write(BASE, RKEY, 64), vec![0; 64])
            .expect("room in the queue");
        sim.pump(a);
        sim.run_for(2 * MS);
        sim.fabric.link(0, 1, 0).loss = 0;
        sim.run_for(100 * MS);
        let at = sim.hosts[a].qps[qa]
            .completions
            .last()
            .expect("a completion")
            .at;
        println!("round {round}: {} us", (at - start) / 1000);
        assert!(at > start && at - start < 14 * MS);
        // It was noticed that something was lost: the next one does not wait so long.
        let (_, longest) = one_by_one(&mut sim, a, qa, 150 * MS);
        assert!(longest < MS);
    }
}

fn lossy(seed: u64, loss: u32) -> f64 {
    let mut link = Link::new(400_000, 100 * US);
    link.loss = loss;
    let (mut sim, _, qa) = pair(seed, &link);
    let flow = stream_writes(&mut sim, &[qa], 64, S);
    print_counters(&mut sim, qa);
    println!("{:?}", sim.fabric.link(0, 1, 0).stats);
    flow.rate
}

#[test]
fn loss_costs_little() {
    let full = lossy(2, 0);
    assert!(full > 370.0);
    for (loss, least) in [
        (1_000, 0.98),
        (10_000, 0.97),
        (50_000, 0.95),
        (100_000, 0.90),
    ] {
        let r = lossy(3, loss);
        println!(
            "loss {} %: {:.1} %",
            loss as f64 / 10_000.0,
            100.0 * r / full
        );
        assert!(r / full > least, "{r} of {full}");
    }
}

/// Busy machines: hosts stand still for milliseconds, many times a second.
#[test]
fn loss_on_noisy_hosts() {
    for noise in [2 * MS, 6 * MS] {
        let mut rates = Vec::new();
        for loss in [0, 10_000, 100_000] {
            let mut link = Link::new(400_000, 100 * US);
            link.loss = loss;
            let (mut sim, _, qa) = pair(5, &link);
            sim.hosts[0].config.margin = MS;
            sim.noise = noise;
            sim.batch_time = 10 * US;
            let flow = stream_writes(&mut sim, &[qa], 64, 2 * S);
            print_counters(&mut sim, qa);
            rates.push(flow.rate);
        }
        println!("noise {noise}: {rates:.0?}");
        assert!(rates[1] > 0.95 * rates[0]);
        assert!(rates[2] > 0.80 * rates[0]);
    }
}

/// What selftests/loss.sh asks for, in simulated time: sixteen Writes of 64 KiB in flight over
/// 400 Mbit/s and 100 us, loss in both directions, a queue that takes everything. Hosts stand
/// still for up to `noise`, half of the time.
#[test]
fn share_of_the_bandwidth_under_loss() {
    for (noise, bounds) in [(0, [0.98, 0.97, 0.93]), (3 * MS, [0.97, 0.91, 0.84])] {
        let mut full = 0.0;
        for (loss, bound) in [
            (0, 0.0),
            (10_000, bounds[0]),
            (50_000, bounds[1]),
            (100_000, bounds[2]),
        ] {
            let mut rates = Vec::new();
            for seed in 1..=5 {
                let mut link = Link::new(400_000, 100 * US);
                link.loss = loss;
                link.limit = 20_000;
                let (mut sim, _, qa) = pair(seed, &link);
                for h in &mut sim.hosts {
                    h.config.margin = MS;
                    h.skip_crc = true;
                }
                sim.noise = noise;
                sim.batch_time = 10 * US;
                sim.copy_time = 10 * US;
                rates.push(stream_writes(&mut sim, &[qa], 16, S / 2).rate);
            }
            rates.sort_by(f64::total_cmp);
            let median = rates[2];
            if loss == 0 {
                full = median;
                continue;
            }
            println!(
                "noise {} us, loss {} %: {:.1} % {rates:.0?}",
                noise / US,
                loss / 10_000,
                100.0 * median / full
            );
            assert!(median > bound * full, "{median} of {full}");
        }
    }
}

/// Where more paths meet on one link than on the other, less goes over each of them: paths are
/// compared by the queue that stands on them, not by what is in flight alone, which would give
/// each an equal part of what is sent and leave a link idle.
#[test]
fn links_with_fewer_paths_are_not_idle() {
    for seed in [18, 19] {
        let mut sim = hosts(seed, 8);
        sim.fabric.spines(0, 1, 2, &Link::new(10_000_000, 50 * US));
        let (qa, _) = sim.connect(0, 1, &QpSetup::default());
        sim.run_for(20 * MS);
        let c = sim.hosts[0].connection(qa);
        let ports: Vec<u16> = c.paths().map(|p| p.port).collect();
        let on = |i: usize| {
            ports
                .iter()
                .filter(|p| sim.fabric.spine_of(**p, 2) == i)
                .count()
        };
        let few = on(0).min(on(1));
        stream_writes(&mut sim, &[qa], 5, 20 * MS);
        let rate = stream_writes(&mut sim, &[qa], 5, 20 * MS).rate;
        println!("seed {seed}: {few} of 8 paths on one link: {rate:.0} Mbit/s");
        // 14287 and 16594 by what is in flight alone.
        let least = match few {
            2 => 15_600.0,
            3 => 17_400.0,
            _ => panic!("{few} of 8 paths on one link"),
        };
        assert!(rate >= least);
    }
}
