// SPDX-License-Identifier: GPL-2.0

//! Runs a small program of several threads in every order, and with every value that a load may
//! see.
//!
//! Threads are threads of the operating system of which one runs at a time; before each operation
//! on an atomic the next one is chosen. Memory is that of C11 with a history of stores for each
//! word: a thread knows a least position in each (its view), may load anything from there on, and
//! gets to know more by acquiring what others released. Stores enter a history at its end, and a
//! `SeqCst` operation counts as acquire and release (fences as they are): what the programs here
//! rely on holds without more.
//!
//! The search is depth first over the choices made in one execution. Orders in which a thread that
//! could go on is put off more often than a bound are left out: nearly every fault shows with two.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex as StdMutex, MutexGuard};

pub use std::sync::atomic::Ordering;

/// A thread of the program.
pub type Body = Box<dyn FnOnce() + Send>;

/// What is explored: threads, and what has to hold when all have ended.
pub struct Program {
    /// The threads.
    pub threads: Vec<Body>,
    /// Fails by [`require`]. It sees everything that the threads did.
    pub end: Body,
}

/// What was found.
#[derive(Debug)]
pub struct Report {
    /// Executions tried.
    pub executions: u64,
    /// What failed in the last of them, with the choices that led there.
    pub failure: Option<String>,
}

/// Positions in the histories, by word.
type View = Vec<u32>;

fn join(into: &mut View, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, b) in into.iter_mut().zip(from) {
        *a = (*a).max(*b);
    }
}

/// A store, and what whoever acquires it gets to know.
struct Store {
    value: u64,
    view: View,
}

#[derive(Default)]
struct Thread {
    /// What it knows.
    known: View,
    /// What it has loaded without acquiring: known after the next fence.
    loaded: View,
    /// What it released by its last fence.
    released: View,
    waits_for: Option<usize>,
    ended: bool,
}

#[derive(Default)]
struct Lock {
    holder: Option<usize>,
    view: View,
}

struct State {
    /// (taken, of how many).
    choices: Vec<(usize, usize)>,
    at: usize,
    /// Whose turn it is; 0 is who made the program.
    turn: usize,
    put_off: usize,
    bound: usize,
    words: Vec<Vec<Store>>,
    locks: Vec<Lock>,
    threads: Vec<Thread>,
    fences: View,
    failure: Option<String>,
}

impl State {
    fn choose(&mut self, of: usize) -> usize {
        if of <= 1 {
            return 0;
        }
        if self.at == self.choices.len() {
            self.choices.push((0, of));
        }
        let (taken, was) = self.choices[self.at];
        assert_eq!(was, of, "the program is not the same each time");
        self.at += 1;
        taken
    }

    fn fail(&mut self, why: String) {
        if self.failure.is_none() {
            let taken: Vec<usize> = self.choices[..self.at].iter().map(|c| c.0).collect();
            self.failure = Some(format!("{why}; choices {taken:?}"));
        }
    }

    fn know(&mut self, me: usize, word: usize, at: usize) {
        let known = &mut self.threads[me].known;
        if known.len() <= word {
            known.resize(word + 1, 0);
        }
        known[word] = known[word].max(at as u32);
    }
}

struct Execution {
    state: StdMutex<State>,
    turn: Condvar,
}

thread_local! {
    static SELF: RefCell<Option<(Arc<Execution>, usize)>> = const { RefCell::new(None) };
}

/// Ends a thread of an execution that has failed, without a word.
struct Over;

fn over() -> ! {
    resume_unwind(Box::new(Over))
}

impl Execution {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    /// Lets a thread go on: `me`, unless it is blocked or has ended, or another one.
    fn schedule<'a>(&'a self, mut s: MutexGuard<'a, State>, me: usize) -> MutexGuard<'a, State> {
        let can = |t: &Thread| !t.ended && t.waits_for.is_none();
        let goes_on = can(&s.threads[me]);
        let mut able: Vec<usize> = Vec::new();
        if goes_on {
            able.push(me);
        }
        if !goes_on || s.put_off < s.bound {
            able.extend((1..s.threads.len()).filter(|t| *t != me && can(&s.threads[*t])));
        }
        if able.is_empty() {
            if s.threads[1..].iter().any(|t| !t.ended) {
                s.fail("all that are left wait for each other".into());
            }
            s.turn = 0;
        } else {
            let pick = s.choose(able.len());
            s.turn = able[pick];
            if goes_on && s.turn != me {
                s.put_off += 1;
            }
        }
        if s.turn != me || s.failure.is_some() {
            self.turn.notify_all();
        }
        if s.threads[me].ended {
            return s;
        }
        self.wait(s, me)
    }

    fn wait<'a>(&'a self, mut s: MutexGuard<'a, State>, me: usize) -> MutexGuard<'a, State> {
        while s.turn != me && s.failure.is_none() {
            s = self
                .turn
                .wait(s)
                .unwrap_or_else(|poison| poison.into_inner());
        }
        if s.failure.is_some() && me != 0 {
            drop(s);
            over();
        }
        s
    }
}

fn current() -> (Arc<Execution>, usize) {
    SELF.with(|s| s.borrow().clone())
        .expect("used outside of a program that is explored")
}

/// One step of the current thread; others may come before it.
fn step<R>(f: impl FnOnce(&mut State, usize) -> R) -> R {
    let (execution, me) = current();
    let mut s = execution.lock();
    if me != 0 {
        s = execution.schedule(s, me);
    }
    f(&mut s, me)
}

/// Fails the execution unless `what` holds.
pub fn require(what: bool, why: &str) {
    if !what {
        let (execution, _) = current();
        execution.lock().fail(why.into());
        execution.turn.notify_all();
        over();
    }
}

/// Runs `make`'s program in every order in which no more than `bound` times a thread that could
/// go on is put off. Stops at the first failure.
pub fn explore(bound: usize, make: impl Fn() -> Program) -> Report {
    let mut choices = Vec::new();
    let mut executions = 0;
    loop {
        executions += 1;
        let execution = Arc::new(Execution {
            state: StdMutex::new(State {
                choices,
                at: 0,
                turn: 0,
                put_off: 0,
                bound,
                words: Vec::new(),
                locks: Vec::new(),
                threads: vec![Thread::default()],
                fences: View::new(),
                failure: None,
            }),
            turn: Condvar::new(),
        });
        run(&execution, &make);
        let mut s = execution.lock();
        if s.failure.is_some() {
            let failure = s.failure.take();
            return Report {
                executions,
                failure,
            };
        }
        choices = std::mem::take(&mut s.choices);
        while choices.last().is_some_and(|(taken, of)| taken + 1 == *of) {
            choices.pop();
        }
        match choices.last_mut() {
            Some(last) => last.0 += 1,
            None => {
                return Report {
                    executions,
                    failure: None,
                }
            }
        }
    }
}

fn run(execution: &Arc<Execution>, make: &impl Fn() -> Program) {
    let be = |me| SELF.with(|s| *s.borrow_mut() = Some((execution.clone(), me)));
    be(0);
    let program = make();
    std::thread::scope(|scope| {
        let mut s = execution.lock();
        let known = s.threads[0].known.clone();
        for _ in &program.threads {
            s.threads.push(Thread {
                known: known.clone(),
                ..Thread::default()
            });
        }
        for (i, body) in program.threads.into_iter().enumerate() {
            let me = i + 1;
            scope.spawn(move || {
                be(me);
                let done = catch_unwind(AssertUnwindSafe(|| {
                    drop(execution.wait(execution.lock(), me));
                    body();
                }));
                let mut s = execution.lock();
                if let Err(why) = done {
                    if !why.is::<Over>() {
                        s.fail("a thread panicked".into());
                    }
                }
                s.threads[me].ended = true;
                if s.failure.is_some() {
                    execution.turn.notify_all();
                } else {
                    drop(execution.schedule(s, me));
                }
            });
        }
        // Who begins.
        s.threads[0].ended = true;
        s = execution.schedule(s, 0);
        drop(execution.wait(s, 0));
    });
    {
        let mut s = execution.lock();
        if s.failure.is_some() {
            return;
        }
        for i in 1..s.threads.len() {
            let known = std::mem::take(&mut s.threads[i].known);
            join(&mut s.threads[0].known, &known);
        }
    }
    if let Err(why) = catch_unwind(AssertUnwindSafe(program.end)) {
        if !why.is::<Over>() {
            execution.lock().fail("the end panicked".into());
        }
    }
}

fn acquires(order: Ordering) -> bool {
    matches!(
        order,
        Ordering::Acquire | Ordering::AcqRel | Ordering::SeqCst
    )
}

fn releases(order: Ordering) -> bool {
    matches!(
        order,
        Ordering::Release | Ordering::AcqRel | Ordering::SeqCst
    )
}

/// A fence of the current thread.
pub fn fence(order: Ordering) {
    step(|s, me| {
        let thread = &mut s.threads[me];
        if acquires(order) {
            let loaded = std::mem::take(&mut thread.loaded);
            join(&mut thread.known, &loaded);
        }
        if order == Ordering::SeqCst {
            join(&mut thread.known, &s.fences);
            s.fences.clone_from(&thread.known);
        }
        if releases(order) {
            thread.released.clone_from(&thread.known);
        }
    });
}

/// A word of memory.
#[derive(Debug)]
struct Word(usize);

impl Word {
    fn new(value: u64) -> Self {
        step(|s, me| {
            s.words.push(vec![Store {
                value,
                view: View::new(),
            }]);
            let word = s.words.len() - 1;
            s.know(me, word, 0);
            Word(word)
        })
    }

    fn seen(s: &mut State, me: usize, word: usize, at: usize, order: Ordering) -> u64 {
        s.know(me, word, at);
        let store = &s.words[word][at];
        let thread = &mut s.threads[me];
        if acquires(order) {
            join(&mut thread.known, &store.view);
        } else {
            join(&mut thread.loaded, &store.view);
        }
        store.value
    }

    fn load(&self, order: Ordering) -> u64 {
        step(|s, me| {
            let newest = s.words[self.0].len() - 1;
            let known = s.threads[me].known.get(self.0).map_or(0, |k| *k as usize);
            // The newest first: most programs then end soonest.
            let at = newest - s.choose(newest - known + 1);
            Self::seen(s, me, self.0, at, order)
        })
    }

    fn append(s: &mut State, me: usize, word: usize, value: u64, order: Ordering, mut view: View) {
        let at = s.words[word].len();
        s.know(me, word, at);
        let thread = &s.threads[me];
        join(
            &mut view,
            if releases(order) {
                &thread.known
            } else {
                &thread.released
            },
        );
        if view.len() <= word {
            view.resize(word + 1, 0);
        }
        view[word] = at as u32;
        s.words[word].push(Store { value, view });
    }

    fn store(&self, value: u64, order: Ordering) {
        step(|s, me| Self::append(s, me, self.0, value, order, View::new()));
    }

    /// Gives the old value, and whether `to` made a new one of it.
    fn update(&self, order: Ordering, to: impl FnOnce(u64) -> Option<u64>) -> (u64, bool) {
        step(|s, me| {
            let at = s.words[self.0].len() - 1;
            let old = Self::seen(s, me, self.0, at, order);
            let new = to(old);
            if let Some(new) = new {
                let view = s.words[self.0][at].view.clone();
                Self::append(s, me, self.0, new, order, view);
            }
            (old, new.is_some())
        })
    }
}

macro_rules! atomics {
    ($($name:ident: $int:ty,)*) => {$(
        /// Like that of `core`.
        #[derive(Debug)]
        pub struct $name(Word);

        #[allow(missing_docs)]
        impl $name {
            pub fn new(value: $int) -> Self {
                Self(Word::new(u64::from(value)))
            }
            pub fn load(&self, order: Ordering) -> $int {
                self.0.load(order) as $int
            }
            pub fn store(&self, value: $int, order: Ordering) {
                self.0.store(u64::from(value), order);
            }
            pub fn swap(&self, value: $int, order: Ordering) -> $int {
                self.0.update(order, |_| Some(u64::from(value))).0 as $int
            }
            pub fn fetch_add(&self, value: $int, order: Ordering) -> $int {
                self.0.update(order, |old| Some(u64::from((old as $int).wrapping_add(value)))).0 as $int
            }
            pub fn fetch_sub(&self, value: $int, order: Ordering) -> $int {
                self.0.update(order, |old| Some(u64::from((old as $int).wrapping_sub(value)))).0 as $int
            }
            pub fn fetch_or(&self, value: $int, order: Ordering) -> $int {
                self.0.update(order, |old| Some(old | u64::from(value))).0 as $int
            }
            pub fn fetch_max(&self, value: $int, order: Ordering) -> $int {
                self.0.update(order, |old| Some(old.max(u64::from(value)))).0 as $int
            }
            /// In one step: one that fails and is tried again is no other behaviour.
            pub fn fetch_update(
                &self,
                set: Ordering,
                _fetch: Ordering,
                mut to: impl FnMut($int) -> Option<$int>,
            ) -> Result<$int, $int> {
                match self.0.update(set, |old| to(old as $int).map(u64::from)) {
                    (old, true) => Ok(old as $int),
                    (old, false) => Err(old as $int),
                }
            }
        }
    )*};
}

atomics! {
    AtomicU32: u32,
    AtomicU64: u64,
}

/// A lock. What it guards is in plain memory, of which only one thread at a time runs.
pub struct Mutex<T> {
    lock: usize,
    value: StdMutex<T>,
}

/// A held lock.
pub struct Guard<'a, T> {
    lock: usize,
    value: Option<MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// A free lock.
    pub fn new(value: T) -> Self {
        let lock = step(|s, _| {
            s.locks.push(Lock::default());
            s.locks.len() - 1
        });
        Self {
            lock,
            value: StdMutex::new(value),
        }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        let (execution, me) = current();
        let mut s = execution.lock();
        if me != 0 {
            s = execution.schedule(s, me);
            while s.locks[self.lock].holder.is_some() {
                s.threads[me].waits_for = Some(self.lock);
                s = execution.schedule(s, me);
            }
        }
        s.locks[self.lock].holder = Some(me);
        let State { locks, threads, .. } = &mut *s;
        join(&mut threads[me].known, &locks[self.lock].view);
        drop(s);
        let value = self
            .value
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        Guard {
            lock: self.lock,
            value: Some(value),
        }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.value = None;
        let (execution, me) = current();
        let mut s = execution.lock();
        let State { locks, threads, .. } = &mut *s;
        locks[self.lock].holder = None;
        locks[self.lock].view.clone_from(&threads[me].known);
        for thread in threads.iter_mut() {
            if thread.waits_for == Some(self.lock) {
                thread.waits_for = None;
            }
        }
    }
}

impl<T> std::ops::Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value.as_ref().expect("held")
    }
}

impl<T> std::ops::DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("held")
    }
}
