// SPDX-License-Identifier: GPL-2.0

//! The loop: take an input, change it, run it, keep it when it reached something new.

#![forbid(unsafe_code)]

use crate::corpus::to_hex;
use crate::{coverage, Target};
use metaroce_sim::Rng;
use std::cell::RefCell;
use std::time::{Duration, Instant};

thread_local! {
    /// The input that runs; shown when it panics.
    static CURRENT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// From now on a panic prints the input that led to it.
pub fn show_failing_input(target: Target) {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        usual(info);
        CURRENT.with_borrow(|input| {
            eprintln!("target {}, input {}", target.name, to_hex(input));
        });
    }));
}

/// How long, and from where.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time at the most.
    pub time: Duration,
    /// Executions at the most.
    pub runs: u64,
    /// Seed of the changes.
    pub seed: u64,
}

/// What came of it.
pub struct Outcome {
    /// Executions.
    pub runs: u64,
    /// Edges that were passed.
    pub edges: usize,
    /// A smallest set of inputs that passes them all, as often.
    pub corpus: Vec<Vec<u8>>,
}

/// What has been reached: a bit per class of count, for each edge.
struct Reached(Vec<u8>);

impl Reached {
    fn new() -> Self {
        Self(vec![0; coverage::edges()])
    }

    /// Adds the last run; how many bits were new.
    fn add(&mut self) -> usize {
        let mut new = 0;
        coverage::take(|edge, class| {
            let bit = 1 << class;
            if self.0[edge] & bit == 0 {
                self.0[edge] |= bit;
                new += 1;
            }
        });
        new
    }

    fn edges(&self) -> usize {
        self.0.iter().filter(|e| **e != 0).count()
    }
}

fn run(target: Target, input: &[u8]) {
    CURRENT.with_borrow_mut(|c| {
        c.clear();
        c.extend_from_slice(input);
    });
    (target.run)(input);
}

/// Fuzzes `target`, beginning with `seeds`. Panics with the target.
pub fn fuzz(target: Target, seeds: Vec<Vec<u8>>, limits: Limits) -> Outcome {
    let mut rng = Rng::new(limits.seed);
    let mut reached = Reached::new();
    let mut corpus = Vec::new();
    let mut runs = 0;
    let begun = Instant::now();
    let mut told = begun;
    coverage::take(|_, _| ());
    for s in seeds {
        run(target, &s);
        runs += 1;
        if reached.add() != 0 || coverage::edges() == 0 {
            corpus.push(s);
        }
    }
    if corpus.is_empty() {
        corpus.push(vec![0; 64]);
    }
    let mut input = Vec::new();
    while runs < limits.runs && (runs % 64 != 0 || begun.elapsed() < limits.time) {
        // The newest ones twice as often.
        let half = corpus.len() / 2;
        let from = if below(&mut rng, 2) == 0 { half } else { 0 };
        let i = from + below(&mut rng, corpus.len() - from);
        input.clear();
        input.extend_from_slice(&corpus[i]);
        change(&mut rng, &mut input, &corpus, target.longest);
        run(target, &input);
        runs += 1;
        if reached.add() != 0 {
            corpus.push(input.clone());
        }
        if runs % 4096 == 0 && told.elapsed() > Duration::from_secs(20) {
            told = Instant::now();
            eprintln!(
                "{}: {runs} runs, {} edges, {} inputs",
                target.name,
                reached.edges(),
                corpus.len()
            );
        }
    }
    Outcome {
        runs,
        edges: reached.edges(),
        corpus: smallest(target, corpus),
    }
}

/// The inputs of `all` that a set needs to pass every edge that all of them pass, at least
/// once: short ones first. How often an edge is passed leads the search, but would keep too
/// many.
pub fn smallest(target: Target, mut all: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    all.sort_by_key(|i| i.len());
    let mut seen = vec![false; coverage::edges()];
    all.retain(|input| {
        coverage::take(|_, _| ());
        run(target, input);
        let mut new = seen.is_empty();
        coverage::take(|edge, _| new |= !std::mem::replace(&mut seen[edge], true));
        new
    });
    all
}

/// Numbers that are at the border of something.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    7,
    16,
    63,
    64,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    u64::MAX,
];

/// A number below `n`; 0 when `n` is.
fn below(rng: &mut Rng, n: usize) -> usize {
    rng.below(n as u64) as usize
}

fn change(rng: &mut Rng, input: &mut Vec<u8>, corpus: &[Vec<u8>], longest: usize) {
    let most = 1 << below(rng, 4);
    for _ in 0..1 + below(rng, most) {
        let len = input.len();
        let at = below(rng, len + 1);
        match below(rng, 12) {
            0 | 1 if at < len => input[at] ^= 1 << below(rng, 8),
            2 | 3 if at < len => input[at] = rng.next() as u8,
            4 if at < len => {
                input[at] = input[at].wrapping_add(below(rng, 17) as u8).wrapping_sub(8)
            }
            5 => {
                let n = [1, 2, 4, 8][below(rng, 4)];
                let number = NUMBERS[below(rng, NUMBERS.len())].to_be_bytes();
                for (to, from) in input.iter_mut().skip(at).zip(&number[8 - n..]) {
                    *to = *from;
                }
            }
            6 => {
                for _ in 0..1 + below(rng, 8) {
                    input.insert(at, rng.next() as u8);
                }
            }
            7 => {
                let most = below(rng, len - at + 1);
                let n = below(rng, 1 + most);
                input.drain(at..at + n);
            }
            8 => {
                let n = 1 + below(rng, 32);
                let piece: Vec<u8> = input.iter().skip(at).take(n).copied().collect();
                let to = below(rng, len + 1);
                input.splice(to..to, piece);
            }
            9 | 10 => {
                // A piece of another input, instead of what is here or between it.
                let other = &corpus[below(rng, corpus.len())];
                let from = below(rng, other.len() + 1);
                let n = 1 + below(rng, other.len() - from + 1);
                let piece: Vec<u8> = other.iter().skip(from).take(n).copied().collect();
                let over = if below(rng, 2) == 0 { piece.len() } else { 0 };
                input.splice(at..(at + over).min(len), piece);
            }
            _ => input.truncate(at.max(1)),
        }
    }
    input.truncate(longest);
}
