// SPDX-License-Identifier: GPL-2.0
//! Results in the kernel's test format (KTAP), on stdout.

#![forbid(unsafe_code)]

use std::io::Write;
use std::time::Instant;

/// How a test ended when it did not pass.
#[derive(Debug)]
pub enum Stop {
    /// The device, the kernel or the machine does not offer what is tested.
    Skip(String),
    /// What must hold does not.
    Fail(String),
}

/// Result of a test or of a step of one.
pub type Outcome<T = ()> = Result<T, Stop>;

impl From<String> for Stop {
    fn from(text: String) -> Self {
        Stop::Fail(text)
    }
}

impl From<&str> for Stop {
    fn from(text: &str) -> Self {
        Stop::Fail(text.to_string())
    }
}

/// Fails a test with a formatted text.
#[macro_export]
macro_rules! fail {
    ($($arg:tt)*) => { return Err($crate::ktap::Stop::Fail(format!($($arg)*))) };
}

/// Skips a test with a formatted text.
#[macro_export]
macro_rules! skip {
    ($($arg:tt)*) => { return Err($crate::ktap::Stop::Skip(format!($($arg)*))) };
}

/// Fails a test with a formatted text unless the condition holds.
#[macro_export]
macro_rules! check {
    ($condition:expr, $($arg:tt)*) => { if !$condition { $crate::fail!($($arg)*); } };
}

/// Writer of the results of one program.
pub struct Ktap {
    planned: usize,
    number: usize,
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Ktap {
    /// Prints the head for `planned` tests.
    pub fn new(planned: usize) -> Self {
        println!("KTAP version 1\n1..{planned}");
        Ktap { planned, number: 0, passed: 0, failed: 0, skipped: 0 }
    }

    /// Prints the result of test `name`, which took since `start`.
    pub fn report(&mut self, name: &str, start: Instant, outcome: &Outcome) {
        self.number += 1;
        let took = start.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                self.passed += 1;
                println!("ok {} {name} # {took:.2} s", self.number);
            }
            Err(Stop::Skip(why)) => {
                self.skipped += 1;
                println!("ok {} {name} # SKIP {why}", self.number);
            }
            Err(Stop::Fail(why)) => {
                self.failed += 1;
                for line in why.lines() {
                    println!("# {line}");
                }
                println!("not ok {} {name} # {took:.2} s", self.number);
            }
        }
        let _ = std::io::stdout().flush();
    }

    /// Runs `test` and prints its result.
    pub fn run(&mut self, name: &str, test: impl FnOnce() -> Outcome) -> bool {
        let start = Instant::now();
        let outcome = test();
        self.report(name, start, &outcome);
        !matches!(outcome, Err(Stop::Fail(_)))
    }

    /// Prints the totals and gives the exit status: 0 good, 1 failures, 4 everything skipped.
    pub fn finish(self) -> i32 {
        println!("# totals: pass:{} fail:{} skip:{}", self.passed, self.failed, self.skipped);
        if self.failed > 0 || self.number < self.planned {
            1
        } else if self.passed == 0 && self.skipped > 0 {
            4
        } else {
            0
        }
    }
}

/// Prints a line that is no result.
pub fn note(text: &str) {
    for line in text.lines() {
        println!("# {line}");
    }
    let _ = std::io::stdout().flush();
}
