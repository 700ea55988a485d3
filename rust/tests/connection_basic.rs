// SPDX-License-Identifier: GPL-2.0

//! A connection on good and on lossy links.

use metaroce::proto::api::Status;
use metaroce_sim::{write, Link, Note, QpSetup, Sim, MS, S, US};

const RKEY: u32 = 0x77;
const BASE: u64 = 0x10_0000;

fn pair(seed: u64, link: &Link) -> (Sim, usize, usize) {
    let mut sim = Sim::new(seed);
    let (a, b) = (sim.add_host(), sim.add_host());
    sim.fabric.direct(a, b, link);
    sim.hosts[b].register(RKEY, BASE, 1 << 24);
    sim.hosts[a].register(RKEY, BASE, 1 << 24);
    let (qa, _) = sim.connect(a, b, &QpSetup::default());
    sim.run_for(20 * MS);
    (sim, a, qa)
}

#[test]
fn one_write_is_one_packet_and_one_ack() {
    let (mut sim, a, qa) = pair(1, &Link::new(10_000_000, 5 * US));
    for round in 0..10u64 {
        let before: Vec<_> = [(0, 1), (1, 0)]
            .map(|(x, y)| sim.fabric.link(x, y, 0).stats.packets)
            .to_vec();
        let data = sim.rng.bytes(64);
        let start = sim.now;
        let n = sim.hosts[a]
            .post(start, qa, write(BASE + 64 * round, RKEY, 64), data.clone())
            .unwrap();
        sim.pump(a);
        sim.run_for(100 * US);
        let c = *sim.hosts[a].qps[qa].completions.last().unwrap();
        assert_eq!((c.wr, c.status), (n, Status::Success));
        assert!(c.at - start < 16 * US, "took {} ns", c.at - start);
        let at = 64 * round as usize;
        assert_eq!(sim.hosts[1].memory[&RKEY].data[at..at + 64], data[..]);
        sim.run_for(50 * MS);
        let after: Vec<_> = [(0, 1), (1, 0)]
            .map(|(x, y)| sim.fabric.link(x, y, 0).stats.packets)
            .to_vec();
        assert_eq!((after[0] - before[0], after[1] - before[1]), (1, 1));
    }
}

/// Keeps `depth` Writes of 64 KiB outstanding for `time`; gives the Mbit/s of what was
/// completed.
fn write_bandwidth(sim: &mut Sim, a: usize, qa: usize, depth: usize, time: u64) -> f64 {
    let len = 65536;
    let source = sim.rng.bytes(len);
    let mut posted = 0u64;
    let (start, end) = (sim.now, sim.now + time);
    let mut done = 0u64;
    let mut last = start;
    let mut longest = 0;
    sim.notes.clear();
    loop {
        while posted < done + depth as u64 {
            let va = BASE + (posted % 128) * len as u64;
            let now = sim.now;
            sim.hosts[a]
                .post(now, qa, write(va, RKEY, len), source.clone())
                .unwrap();
            posted += 1;
        }
        sim.pump(a);
        if !sim.step(end) {
            break;
        }
        while let Some((_, n)) = sim.notes.pop_front() {
            if let Note::Sent { status, wr, .. } = n {
                assert_eq!(status, Status::Success);
                sim.hosts[a].qps[qa].sends.remove(&wr);
                done += 1;
                longest = longest.max(sim.now - last);
                last = sim.now;
            }
        }
    }
    let rate = (done * len as u64 * 8) as f64 * 1000.0 / (last - start) as f64;
    println!("{rate:.1} Mbit/s, longest pause {} us", longest / 1000);
    rate
}

fn lossy(seed: u64, loss: u32) -> f64 {
    let mut link = Link::new(400_000, 100 * US);
    link.loss = loss;
    let (mut sim, a, qa) = pair(seed, &link);
    let r = write_bandwidth(&mut sim, a, qa, 64, S);
    let c = *sim.hosts[a].connection(qa).counters();
    let d = *sim.hosts[1].connection_at(0).unwrap().counters();
    println!(
        "loss {loss}: sent {} resent {} moved {} spurious {} void {} suspected {} failed {} cuts {} probes {} queries {} acks {} refusals {} dup {}",
        c.sent_packets, c.retransmits, c.moved, c.spurious, c.voids, c.path_suspected, c.path_failed,
        c.window_cuts, c.probes_sent, c.queries_sent, d.acks_sent, c.refusals_rcvd, d.duplicate_request
    );
    let s = sim.fabric.link(0, 1, 0).stats;
    println!("{s:?}");
    r
}

#[test]
fn loss_costs_little() {
    let full = lossy(2, 0);
    assert!(full > 370.0);
    for (loss, least) in [
        (1_000, 0.98),
        (10_000, 0.95),
        (50_000, 0.85),
        (100_000, 0.70),
    ] {
        let r = lossy(3, loss);
        println!(
            "loss {} %: {:.1} %",
            loss as f64 / 10_000.0,
            100.0 * r / full
        );
        assert!(r / full > least, "{} of {}", r, full);
    }
}
