// SPDX-License-Identifier: GPL-2.0

//! The longest time without progress when paths die, with one or few packets in flight:
//! half of all source ports lead nowhere, in both directions, from the start or of a
//! sudden. SEED=n runs one seed, SEEDS=n that many.

#![forbid(unsafe_code)]

mod common;

use common::{hosts, BASE, RKEY};
use metaroce::proto::api::{Status, Time, WrOp};
use metaroce_sim::{wr, Link, Note, QpSetup, Rng, Sim, MS, S, US};

fn seeds(usual: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    match number("SEED") {
        Some(s) => s..s + 1,
        None => 1..1 + number("SEEDS").unwrap_or(usual),
    }
}

/// What is in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Traffic {
    /// A Write and its completion.
    Write,
    /// A Send that the peer's program answers with a Send.
    PingPong,
    /// A READ: request and response.
    Read,
}

/// What happens to spine 0.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Death {
    /// It never worked.
    AtStart,
    /// It dies while traffic goes, in both directions.
    Sudden,
    /// Spines die and return in turn; one always works.
    InTurn,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    traffic: Traffic,
    death: Death,
    spines: usize,
    paths: u8,
    /// Operations in flight.
    depth: usize,
    len: usize,
    /// Loss of the living spines, millionths.
    loss: u32,
    /// In turn: a spine works again for up to this long when the next one dies.
    overlap: Time,
    /// Duration of a run.
    time: Time,
    /// Hosts stand still for up to this long, half of the time.
    noise: Time,
}

impl Case {
    const fn new(traffic: Traffic, death: Death) -> Self {
        Self {
            traffic,
            death,
            spines: 2,
            paths: 16,
            depth: 1,
            len: 64,
            loss: 0,
            overlap: 20 * MS,
            time: 300 * MS,
            noise: 0,
        }
    }
}

fn noise(sim: &mut Sim) {
    for h in 0..sim.hosts.len() {
        if sim.hosts[h].next_noise <= sim.now {
            sim.hosts[h].stalled_until = sim.now + sim.rng.below(sim.noise);
            sim.hosts[h].next_noise = sim.hosts[h].stalled_until + sim.rng.below(sim.noise);
        }
    }
}

fn set_spine(sim: &mut Sim, i: usize, alive: bool) {
    for way in [(0, 1), (1, 0)] {
        sim.fabric.link(way.0, way.1, i).alive = alive;
    }
}

/// Longest time without a completion, and how many there were.
struct Seen {
    /// From the beginning to the first completion.
    first: Time,
    gap: Time,
    done: u64,
}

fn run(seed: u64, c: &Case) -> Seen {
    let mut rng = Rng::new(seed ^ 0x6a70);
    let mut sim = hosts(seed, c.paths);
    let mut link = Link::new(10_000_000, [50, 100, 250][rng.below(3) as usize] * US);
    link.loss = c.loss;
    sim.fabric.salt = rng.next();
    sim.fabric.spines(0, 1, c.spines, &link);
    sim.noise = c.noise;
    sim.trace = std::env::var("TRACE").is_ok();
    for h in 0..2 {
        // As in the driver.
        sim.hosts[h].config.margin = MS;
        sim.hosts[h].skip_crc = true;
    }
    if c.death == Death::AtStart {
        set_spine(&mut sim, 0, false);
    }
    let setup = QpSetup {
        timeout: 500 * MS,
        retry_cnt: 7,
        ..QpSetup::default()
    };
    let start = sim.now;
    let (qa, qb) = sim.connect(0, 1, &setup);
    let mut dies_at = match c.death {
        Death::AtStart => Time::MAX,
        _ => start + 20 * MS + rng.below(20 * MS),
    };
    let end = start + c.time;
    let mut dead: Option<usize> = None;
    let mut next = 0;
    let mut seen = Seen {
        first: 0,
        gap: 0,
        done: 0,
    };
    let mut last = start;
    let mut open = 0;
    let mut answers = 0;
    for h in 0..2 {
        for _ in 0..4096 {
            let now = sim.now;
            sim.hosts[h].post_receive(now, [qa, qb][h], c.len);
        }
    }
    loop {
        while open < c.depth {
            let op = match c.traffic {
                Traffic::Write => WrOp::Write {
                    va: BASE,
                    rkey: RKEY,
                },
                Traffic::Read => WrOp::Read {
                    va: BASE,
                    rkey: RKEY,
                },
                Traffic::PingPong => WrOp::Send,
            };
            let now = sim.now;
            if sim.hosts[0]
                .post(now, qa, wr(op, c.len), vec![1; c.len])
                .is_err()
            {
                break;
            }
            open += 1;
        }
        while answers > 0 {
            let now = sim.now;
            if sim.hosts[1]
                .post(now, qb, wr(WrOp::Send, c.len), vec![2; c.len])
                .is_err()
            {
                break;
            }
            answers -= 1;
        }
        sim.pump(0);
        sim.pump(1);
        if sim.now >= dies_at {
            match dead.take() {
                Some(i) => {
                    set_spine(&mut sim, i, true);
                    next = (i + 1) % c.spines;
                    dies_at = sim.now + rng.below(c.overlap);
                }
                None => {
                    set_spine(&mut sim, next, false);
                    dead = Some(next);
                    dies_at = match c.death {
                        Death::InTurn => sim.now + 10 * MS + rng.below(60 * MS),
                        _ => Time::MAX,
                    };
                }
            }
        }
        if !sim.step(end.min(dies_at)) && sim.now >= end {
            break;
        }
        if sim.noise != 0 {
            noise(&mut sim);
        }
        while let Some((h, n)) = sim.notes.pop_front() {
            let done = match n {
                Note::Sent { status, qp, wr } => {
                    assert_eq!(status, Status::Success, "at {} us", (sim.now - start) / US);
                    sim.hosts[h].qps[qp].sends.remove(&wr);
                    h == 0 && c.traffic != Traffic::PingPong
                }
                Note::Received { .. } if h == 1 => {
                    answers += 1;
                    false
                }
                Note::Received { .. } => true,
                _ => false,
            };
            if done {
                open -= 1;
                seen.done += 1;
                if seen.done == 1 {
                    seen.first = sim.now - start;
                } else {
                    seen.gap = seen.gap.max(sim.now - last);
                }
                last = sim.now;
                if sim.hosts[0].qps[qa].bound + 64 > sim.hosts[0].qps[qa].receives.len() {
                    for h in 0..2 {
                        for _ in 0..4096 {
                            let now = sim.now;
                            sim.hosts[h].post_receive(now, [qa, qb][h], c.len);
                        }
                    }
                }
            }
        }
    }
    seen.gap = seen.gap.max(end - last);
    if seen.done == 0 {
        seen.first = end - start;
    }
    seen
}

/// Runs a case over seeds; no gap may be longer than `bound`.
fn bounded(c: &Case, number: u64, bound: Time) {
    let mut worst = (0, 0);
    let mut late = (0, 0);
    let mut gaps = Vec::new();
    for seed in seeds(number) {
        let s = run(seed, c);
        gaps.push(s.gap);
        if s.gap > bound / 2 {
            println!("seed {seed}: gap {} us", s.gap / US);
        }
        worst = worst.max((s.gap, seed));
        late = late.max((s.first, seed));
    }
    gaps.sort_unstable();
    println!(
        "{c:?}: longest gap {} us (seed {}), median {} us; first completion within {} us (seed {})",
        worst.0 / US,
        worst.1,
        gaps[gaps.len() / 2] / US,
        late.0 / US,
        late.1
    );
    assert!(worst.0 <= bound, "{} us, seed {}", worst.0 / US, worst.1);
    assert!(
        late.0 <= bound.max(40 * MS),
        "first after {} us, seed {}",
        late.0 / US,
        late.1
    );
}

const ALL: [Traffic; 3] = [Traffic::Write, Traffic::PingPong, Traffic::Read];

#[test]
fn half_of_the_paths_never_worked() {
    for t in ALL {
        bounded(&Case::new(t, Death::AtStart), 40, 10 * MS);
    }
}

#[test]
fn half_of_the_paths_die() {
    for t in ALL {
        bounded(&Case::new(t, Death::Sudden), 40, 10 * MS);
    }
}

#[test]
fn spines_die_in_turn() {
    for t in ALL {
        bounded(&Case::new(t, Death::InTurn), 30, 30 * MS);
    }
}

#[test]
fn sixty_four_paths() {
    for death in [Death::AtStart, Death::Sudden, Death::InTurn] {
        let c = Case {
            spines: 4,
            paths: 64,
            ..Case::new(Traffic::PingPong, death)
        };
        bounded(&c, 20, 20 * MS);
    }
}

/// With few paths all of them may be dead: then other ports have to be found.
#[test]
fn few_paths() {
    for (paths, bound) in [(1, 2000), (2, 700), (4, 300)] {
        for death in [Death::AtStart, Death::Sudden] {
            let c = Case {
                paths,
                time: 2 * S,
                ..Case::new(Traffic::Write, death)
            };
            bounded(&c, 10, bound * MS);
        }
    }
}

#[test]
fn a_few_packets_and_loss() {
    for t in ALL {
        for (depth, loss) in [(1, 10_000), (4, 0), (4, 50_000), (1, 100_000)] {
            let c = Case {
                depth,
                loss,
                len: 4096,
                ..Case::new(t, Death::Sudden)
            };
            bounded(&c, 10, 20 * MS);
        }
    }
}

#[test]
fn many_packets() {
    for t in [Traffic::Write, Traffic::Read] {
        for death in [Death::Sudden, Death::InTurn] {
            let c = Case {
                depth: 32,
                len: 16384,
                time: 100 * MS,
                ..Case::new(t, death)
            };
            bounded(&c, 4, 20 * MS);
        }
    }
}

/// Busy machines: what they miss themselves cannot be made up for.
#[test]
fn machines_that_stand_still() {
    for t in ALL {
        for death in [Death::AtStart, Death::Sudden] {
            let c = Case {
                noise: 5 * MS,
                ..Case::new(t, death)
            };
            bounded(&c, 20, 60 * MS);
        }
    }
}
