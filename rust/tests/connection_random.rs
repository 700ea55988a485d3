// SPDX-License-Identifier: GPL-2.0

//! Random weather: spines die and come back, links lose, reorder and duplicate, hosts
//! stand still, QPs come and go. Everything posted completes once, in order and with the
//! right bytes, and traffic goes on whenever a path lives. SEED=n runs one seed, SEEDS=n
//! that many.

#![forbid(unsafe_code)]

mod common;

use common::{BASE, RKEY};
use metaroce::proto::api::{Status, WrOp};
use metaroce_sim::{wr, write, Link, QpSetup, Rng, Sim, MS, S, US};

fn seeds(usual: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    match number("SEED") {
        Some(s) => s..s + 1,
        None => 1..1 + number("SEEDS").unwrap_or(usual),
    }
}

/// Bytes of memory that each QP writes to.
const AREA: usize = 256 * 1024;

struct Flow {
    qp: usize,
    peer: usize,
    area: usize,
    fences: bool,
    expected: Vec<u8>,
    reads: Vec<(u32, Vec<u8>)>,
    sends: Vec<Vec<u8>>,
}

fn post(sim: &mut Sim, rng: &mut Rng, f: &mut Flow) {
    let now = sim.now;
    let longest = [100, 5_000, 70_000][rng.below(3) as usize];
    let len = rng.below(longest + 1) as usize;
    let at = rng.below((AREA - len) as u64 + 1) as usize;
    let va = BASE + (f.area + at) as u64;
    match rng.below(6) {
        0 => {
            // Reads what all earlier Writes have left: it runs after them.
            let n = sim.hosts[0]
                .post(
                    now,
                    f.qp,
                    wr(WrOp::Read { va, rkey: RKEY }, len),
                    vec![0; len],
                )
                .expect("room");
            if f.fences {
                f.reads.push((n, f.expected[at..at + len].to_vec()));
            }
        }
        1 => {
            let data = rng.bytes(len);
            sim.hosts[1].post_receive(now, f.peer, len + rng.below(100) as usize);
            sim.pump(1);
            sim.hosts[0]
                .post(now, f.qp, wr(WrOp::Send, len), data.clone())
                .expect("room");
            f.sends.push(data);
        }
        _ => {
            let data = rng.bytes(len);
            // Without a fence a READ may see what is written after it.
            let mut w = write(va, RKEY, len);
            w.fence = f.fences;
            sim.hosts[0].post(now, f.qp, w, data.clone()).expect("room");
            f.expected[at..at + len].copy_from_slice(&data);
        }
    }
}

fn weather(sim: &mut Sim, rng: &mut Rng, spines: usize) {
    match rng.below(8) {
        0..=2 => {
            let i = rng.below(spines as u64) as usize;
            // One spine always lives, in both directions.
            let alive = rng.chance(400_000) || i == 0;
            for way in [(0, 1), (1, 0)] {
                if rng.chance(800_000) {
                    sim.fabric.link(way.0, way.1, i).alive = alive;
                }
            }
        }
        3 => {
            let loss = [0, 1_000, 10_000, 100_000][rng.below(4) as usize];
            let way = if rng.chance(500_000) { (0, 1) } else { (1, 0) };
            sim.fabric.each(way.0, way.1, |l| l.loss = loss);
        }
        4 => {
            let p = [0, 10_000, 100_000][rng.below(3) as usize];
            let by = rng.below(500) * US;
            sim.fabric
                .each(0, 1, |l| (l.reorder, l.reorder_by) = (p, by));
            sim.fabric
                .each(1, 0, |l| (l.reorder, l.reorder_by) = (p, by));
        }
        5 => {
            let p = [0, 10_000, 100_000][rng.below(3) as usize];
            sim.fabric.each(0, 1, |l| l.duplicate = p);
        }
        6 => {
            let h = rng.below(2) as usize;
            sim.hosts[h].stalled_until = sim.now + rng.below(30) * MS;
        }
        _ => {
            let p = [0, 0, 20_000][rng.below(3) as usize];
            let h = rng.below(2) as usize;
            sim.hosts[h].refuse = p;
        }
    }
}

/// Everything that was posted on the flow's QP is done, and rightly.
fn check(sim: &Sim, f: &Flow) {
    let qp = &sim.hosts[0].qps[f.qp];
    assert_eq!(qp.error, None);
    for (i, c) in qp.completions.iter().enumerate() {
        assert_eq!((c.wr, c.status), (i as u32, Status::Success));
    }
    for (n, bytes) in &f.reads {
        assert!(qp.sends[n].1 == *bytes, "READ {n} has wrong bytes");
    }
    let memory = &sim.hosts[1].memory[&RKEY].data[f.area..f.area + AREA];
    assert!(memory == f.expected, "wrong bytes in memory");
    let peer = &sim.hosts[1].qps[f.peer];
    assert_eq!(peer.received.len(), f.sends.len());
    for (r, data) in peer.receives.iter().zip(&f.sends) {
        assert!(r.data[..data.len()] == *data, "wrong bytes received");
    }
}

/// The QPs of a flow are destroyed and others take their place.
fn renew(sim: &mut Sim, f: &mut Flow, setup: &QpSetup) {
    check(sim, f);
    let now = sim.now;
    sim.hosts[0].destroy(now, f.qp);
    sim.hosts[1].destroy(now, f.peer);
    (f.qp, f.peer) = sim.connect(0, 1, setup);
    f.reads.clear();
    f.sends.clear();
}

fn run(seed: u64) {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let mut sim = Sim::new(seed);
    let (a, b) = (sim.add_host(), sim.add_host());
    let paths = [1, 2, 4, 16, 16, 64][rng.below(6) as usize];
    let spines = 1 + rng.below(4) as usize;
    let mut link = Link::new(
        [100_000, 1_000_000, 10_000_000][rng.below(3) as usize],
        [2, 20, 200][rng.below(3) as usize] * US,
    );
    link.limit = [16, 100, 1000][rng.below(3) as usize];
    link.mark = [0, 10, 50][rng.below(3) as usize];
    println!("paths {paths}, spines {spines}, {link:?}");
    sim.fabric.salt = rng.next();
    sim.fabric.spines(a, b, spines, &link);
    sim.copy_time = [1, 10, 100][rng.below(3) as usize] * US;
    sim.batch_time = [0, 5, 50][rng.below(3) as usize] * US;
    let idle = [5 * MS, 30 * S][rng.below(2) as usize];
    for h in [a, b] {
        sim.hosts[h].config.paths = paths;
        sim.hosts[h].config.path_records = [16, 64, 256][rng.below(3) as usize];
        sim.hosts[h].config.netdev_mtu = [1500, 4200, 9000][rng.below(3) as usize];
        sim.hosts[h].config.idle = idle;
        sim.hosts[h].hold_limit = [4, 256][rng.below(2) as usize];
        sim.hosts[h].skip_crc = true;
    }
    let count = 1 + rng.below(5) as usize;
    sim.hosts[b].register(RKEY, BASE, AREA * count);
    let setup = QpSetup {
        timeout: 0,
        ..QpSetup::default()
    };
    let mut flows: Vec<Flow> = (0..count)
        .map(|i| {
            let (qp, peer) = sim.connect(a, b, &setup);
            Flow {
                qp,
                peer,
                area: i * AREA,
                fences: rng.chance(500_000),
                expected: vec![0; AREA],
                reads: Vec::new(),
                sends: Vec::new(),
            }
        })
        .collect();
    let end = sim.now + 400 * MS;
    while sim.now < end {
        if rng.chance(500_000) {
            weather(&mut sim, &mut rng, spines);
        }
        for f in &mut flows {
            if rng.chance(100_000) && sim.hosts[a].qps[f.qp].open() == 0 {
                renew(&mut sim, f, &setup);
            }
            while sim.hosts[a].qps[f.qp].open() < 20 && rng.chance(700_000) {
                post(&mut sim, &mut rng, f);
            }
        }
        sim.pump(a);
        let pause = rng.below(10 * MS);
        sim.run_for(pause);
    }
    for way in [(0, 1), (1, 0)] {
        sim.fabric.each(way.0, way.1, |l| {
            (l.alive, l.loss, l.reorder, l.duplicate) = (true, 0, 0, 0);
        });
    }
    sim.hosts[a].refuse = 0;
    sim.hosts[b].refuse = 0;
    let healed = sim.now;
    let limit = sim.now + 5 * S;
    while flows.iter().any(|f| sim.hosts[a].qps[f.qp].open() > 0) {
        assert!(
            sim.step(limit),
            "work is left, and nothing happens or too slowly: {:?}",
            sim.hosts[a].connection(flows[0].qp).counters()
        );
    }
    println!("done {} ms after the weather", (sim.now - healed) / MS);
    for f in &flows {
        check(&sim, f);
    }
    // Nothing is left to do, and nothing goes on for ever.
    sim.run_for(4 * S);
    let packets = |sim: &mut Sim| {
        let mut n = 0;
        for way in [(0, 1), (1, 0)] {
            sim.fabric.each(way.0, way.1, |l| n += l.stats.packets);
        }
        n
    };
    let before = packets(&mut sim);
    sim.run_for(S);
    let idle = packets(&mut sim) - before;
    assert!(idle == 0, "{idle} packets in an idle second");
}

#[test]
fn weathers() {
    for seed in seeds(60) {
        run(seed);
    }
}
