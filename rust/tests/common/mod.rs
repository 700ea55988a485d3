// SPDX-License-Identifier: GPL-2.0

//! What the tests of connections share.

#![forbid(unsafe_code)]
#![allow(dead_code)] // not every test uses everything

use metaroce::proto::api::{Host, Status, StreamId, Time};
use metaroce_sim::{write, Link, Note, QpSetup, Sim, MS};

pub const RKEY: u32 = 0x77;
pub const BASE: u64 = 0x10_0000;

/// A host without QPs.
pub struct Nobody;

impl Host for Nobody {
    fn bind_receive(&mut self, _: StreamId, _: u32) -> Option<u64> {
        None
    }
    fn receives_posted(&mut self, _: StreamId) -> Option<u32> {
        None
    }
    fn may_hold(&mut self, _: u32) -> bool {
        true
    }
}

/// Two hosts with memory, and a QP pair whose connection is up.
pub fn pair(seed: u64, link: &Link) -> (Sim, usize, usize) {
    spines(seed, link, 1, 16)
}

/// The same with several links between them.
pub fn spines(seed: u64, link: &Link, n: usize, paths: u8) -> (Sim, usize, usize) {
    let mut sim = hosts(seed, paths);
    sim.fabric.spines(0, 1, n, link);
    let (qa, _) = sim.connect(0, 1, &QpSetup::default());
    sim.run_for(20 * MS);
    (sim, 0, qa)
}

/// Two hosts with memory.
pub fn hosts(seed: u64, paths: u8) -> Sim {
    let mut sim = Sim::new(seed);
    for _ in 0..2 {
        let h = sim.add_host();
        sim.hosts[h].register(RKEY, BASE, 1 << 24);
        sim.hosts[h].config.paths = paths;
    }
    sim
}

/// What [`stream_writes`] saw.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flow {
    /// Mbit/s of completed Writes.
    pub rate: f64,
    /// Writes completed.
    pub done: u64,
    /// Longest time between two completions, ns.
    pub pause: Time,
}

/// Lets hosts stand still now and then, when [`Sim::noise`] says so.
fn noise(sim: &mut Sim) {
    if sim.noise == 0 {
        return;
    }
    for h in 0..sim.hosts.len() {
        if sim.hosts[h].next_noise <= sim.now {
            sim.hosts[h].stalled_until = sim.now + sim.rng.below(sim.noise);
            sim.hosts[h].next_noise = sim.hosts[h].stalled_until + sim.rng.below(sim.noise);
        }
    }
}

/// Keeps `depth` Writes of 64 KiB outstanding on each of the QPs of host 0 for `time`.
pub fn stream_writes(sim: &mut Sim, qps: &[usize], depth: usize, time: Time) -> Flow {
    let len = 65536;
    let source = sim.rng.bytes(len);
    let mut posted = 0u64;
    let (start, end) = (sim.now, sim.now + time);
    let mut flow = Flow::default();
    let mut last = start;
    sim.notes.clear();
    loop {
        for &q in qps {
            while sim.hosts[0].qps[q].open() < depth {
                let va = BASE + (posted % 128) * len as u64;
                let now = sim.now;
                sim.hosts[0]
                    .post(now, q, write(va, RKEY, len), source.clone())
                    .expect("room in the queue");
                posted += 1;
            }
        }
        sim.pump(0);
        if !sim.step(end) {
            break;
        }
        noise(sim);
        while let Some((h, n)) = sim.notes.pop_front() {
            if let (0, Note::Sent { status, wr, qp }) = (h, n) {
                assert_eq!(status, Status::Success);
                sim.hosts[0].qps[qp].sends.remove(&wr);
                flow.done += 1;
                flow.pause = flow.pause.max(sim.now - last);
                last = sim.now;
            }
        }
    }
    flow.pause = flow.pause.max(end - last);
    flow.rate = (flow.done * len as u64 * 8) as f64 * 1000.0 / (end - start) as f64;
    println!(
        "{:.1} Mbit/s, longest pause {} us",
        flow.rate,
        flow.pause / 1000
    );
    flow
}

/// Lets everything posted finish; panics when it does not within `time`.
pub fn drain(sim: &mut Sim, qps: &[usize], time: Time) {
    let end = sim.now + time;
    loop {
        let busy = qps.iter().any(|q| sim.hosts[0].qps[*q].open() > 0);
        if !busy {
            return;
        }
        assert!(sim.now < end, "work is left after {} ms", time / MS);
        if !sim.step(end) {
            assert!(!busy, "nothing happens and work is left");
        }
    }
}

/// Prints the counters of the connections of QP `q` of host 0.
pub fn print_counters(sim: &mut Sim, q: usize) {
    println!("{:?}", sim.hosts[0].connection(q).counters());
    if let Some(c) = sim.hosts[1].connection_at(0) {
        println!("{:?}", c.counters());
    }
}
