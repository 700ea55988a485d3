// SPDX-License-Identifier: GPL-2.0
//! mroce-many: as many connections of one device as its addresses allow, and many QPs on them.
//! Every pair of two of the device's addresses is two connections, one from either end. Each QP
//! sends a message, every byte of which is checked, and what the kernel's memory has grown by is
//! compared with what rust/proto/PROTOCOL.md says.

#![forbid(unsafe_code)]

mod memory;
mod part;

use memory::Memory;
use part::Part;
use selftests::args::Args;
use selftests::endpoint::Device;
use selftests::ktap::{note, Ktap, Outcome};
use selftests::sys::busywait;
use selftests::verbs::{self, Context};
use selftests::{check, fail};
use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

const HELP: &str = "\
usage: mroce-many [--dev NAME] [--qps N] [--processes N] [--wait SECONDS]

  --qps N        QPs in all, an even number (default 2000)
  --processes N  processes that share them (default 4; one has 65,530 mappings at the most,
                 two for each QP)
  --wait S       how long completions, and the end of all, may take (default 60)

The connections are those between all IPv4 addresses of the device. Results are KTAP.
";

/// Bytes of a connection at rest, with one QP's place, as measured and stated in PROTOCOL.md.
const CONNECTION: u64 = 56 << 10;

/// Bytes of a connected QP with queues of one entry, in the kernel as a whole.
const QP: u64 = 56 << 10;

/// Numbers of QPs and connections from which memory tells: what the kernel keeps for later does not
/// count then.
const TELLING: u64 = 200;

/// Writes in a row whose time is told.
const WRITES: usize = 2000;

/// What is to be made.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The device.
    pub device: Device,
    /// QPs in all.
    pub qps: usize,
    /// Processes.
    pub processes: usize,
    /// How long completions may take.
    pub wait: Duration,
}

impl Plan {
    fn from_args(args: &mut Args) -> Self {
        Plan {
            device: Device::from_args(args),
            qps: args.value("--qps").unwrap_or(2000),
            processes: args.value("--processes").unwrap_or(4),
            wait: Duration::from_secs(args.value("--wait").unwrap_or(60)),
        }
    }

    /// Indices and bytes of the device's IPv4 GIDs of RoCE v2.
    pub fn gids(context: &Context) -> io::Result<Vec<(u8, [u8; 16])>> {
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        let all = context.gids()?;
        let ours = all.into_iter().filter(|g| g.1 == verbs::IBV_GID_TYPE_ROCE_V2 && g.2.starts_with(&mapped));
        ours.map(|(index, _, gid)| {
            let index = u8::try_from(index).map_err(|_| io::Error::other("a GID index is above 255"))?;
            Ok((index, gid))
        })
        .collect()
    }

    /// Pairs of two of `gids` addresses.
    pub fn pairs(gids: usize) -> usize {
        gids * gids.saturating_sub(1) / 2
    }
}

/// The test as it goes on.
struct Many {
    plan: Plan,
    context: std::sync::Arc<Context>,
    parts: Vec<Part>,
    connections: u64,
    /// Of the kernel at the beginning.
    begin: Memory,
    /// QPs that there were before.
    others: u64,
}

impl Many {
    /// Has all processes do `what` at the same time.
    fn all(&mut self, what: &str) -> Outcome {
        for part in &mut self.parts {
            part.tell(what).map_err(|e| format!("{what}: {e}"))?;
        }
        for part in &mut self.parts {
            part.answer().map_err(|e| format!("{what}: {e}"))?;
        }
        Ok(())
    }

    /// Has the first process do `what`, and gives its answer.
    fn first(&mut self, what: &str) -> Outcome<String> {
        let Some(part) = self.parts.first_mut() else { fail!("no process") };
        part.tell(what).map_err(|e| format!("{what}: {e}"))?;
        Ok(part.answer().map_err(|e| format!("{what}: {e}"))?)
    }

    /// The QPs that the RDMA core has of the device.
    fn qps(&self) -> Outcome<u64> {
        resource(&self.context.name, "qp")
    }

    /// What the kernel's memory has grown by since `from` for each of `count` things.
    fn grown(&self, from: &Memory, what: &str, count: u64) -> Outcome<Memory> {
        let each = Memory::now()?.since(from).each(count);
        note(&format!("{what}: {count}, {each} each"));
        Ok(each)
    }

    fn run(&mut self, ktap: &mut Ktap) {
        let (qps, connections) = (self.plan.qps as u64, self.connections);
        let mut made = Memory::default();
        let mut per_connection = Memory::default();
        let mut per_qp = Memory::default();
        let mut alone = 0.0;
        let mut good = ktap.run("objects_are_made", || {
            let before = Memory::now()?;
            self.all("make")?;
            let there = self.qps()?;
            check!(there == self.others + qps, "{there} QPs are there, {} were before", self.others);
            made = self.grown(&before, "QPs in INIT", qps)?;
            Ok(())
        });
        good &= good
            && ktap.run("connections_are_made", || {
                alone = self.time_of("one connection")?;
                let before = Memory::now()?;
                self.all("first")?;
                // The first process had connected one pair already.
                per_connection = self.grown(&before, "connections with a QP", connections - 2)?;
                let before = Memory::now()?;
                self.all("rest")?;
                per_qp = self.grown(&before, "further QPs connected", qps - connections)?;
                Ok(())
            });
        good &= good
            && ktap.run("data_arrives_over_each_qp", || {
                let opened = counter(&self.context.name, "conn_opened")?;
                self.all("send")?;
                let opened = counter(&self.context.name, "conn_opened")? - opened;
                note(&format!("{opened} connections opened when they were used"));
                check!(counter(&self.context.name, "conn_errors")? == 0, "connections failed");
                Ok(())
            });
        good &= good
            && ktap.run("memory_is_as_stated", || {
                // A connection comes with a QP's stream.
                let connection = per_connection.total.saturating_sub(per_qp.total);
                let qp = made.total + per_qp.total;
                note(&format!("a connection at rest: {connection} bytes, a connected QP: {qp} bytes"));
                if qps < TELLING || connections < TELLING {
                    return Ok(());
                }
                check!(
                    connection <= CONNECTION,
                    "a connection has {connection} bytes, {CONNECTION} are stated"
                );
                check!(qp <= QP, "a QP has {qp} bytes, {QP} are stated");
                Ok(())
            });
        good &= good
            && ktap.run("one_among_many_costs_what_one_alone_costs", || {
                let among = self.time_of("the same among all")?;
                // Told, not judged: others use the machine.
                note(&format!("{:.2} times as long", among / alone));
                Ok(())
            });
        ktap.run("nothing_is_left", || {
            check!(good, "not all was made");
            let most = Memory::now()?.since(&self.begin).total;
            self.all("drop")?;
            check!(self.qps()? == self.others, "{} QPs are left", self.qps()?);
            // Connections end seconds after their last QP; a fiftieth may stay in the kernel's caches.
            let left = || Memory::now().map_or(u64::MAX, |now| now.since(&self.begin).slab);
            let allowed = most / 50 + (4 << 20);
            let gone = busywait(self.plan.wait, || left() <= allowed);
            note(&format!("{} KiB of {} KiB are left", left() >> 10, most >> 10));
            check!(gone, "more than {} KiB", allowed >> 10);
            Ok(())
        });
    }

    /// Microseconds of a Write, of several one after the other.
    fn time_of(&mut self, name: &str) -> Outcome<f64> {
        let answer = self.first(&format!("write {WRITES}"))?;
        let ns: f64 = answer.parse().map_err(|_| format!("a process says '{answer}'"))?;
        note(&format!("{name}: {:.1} us for a Write of 64 bytes", ns / 1000.0));
        Ok(ns)
    }
}

/// Objects of a kind that the RDMA core has of a device.
fn resource(device: &str, kind: &str) -> Outcome<u64> {
    let out = Command::new("rdma").args(["resource", "show", device]).output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let mut words = text.split_whitespace().skip_while(|w| *w != kind);
    match words.nth(1).and_then(|w| w.parse().ok()) {
        Some(n) => Ok(n),
        None => fail!("rdma resource show {device} has no {kind}: {text}"),
    }
}

fn counter(device: &str, name: &str) -> Outcome<u64> {
    let file = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/{name}");
    let text = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}"))?;
    Ok(text.trim().parse().map_err(|_| format!("{file}: '{text}'"))?)
}

fn start(plan: Plan) -> Result<Many, String> {
    let context = Context::open(plan.device.name.as_deref()).map_err(|e| e.to_string())?;
    let gids = Plan::gids(&context).map_err(|e| e.to_string())?.len();
    let pairs = Plan::pairs(gids);
    if plan.qps < 2 * pairs || pairs < plan.processes || plan.processes == 0 {
        return Err(format!(
            "{gids} addresses are {pairs} pairs, each of which needs 2 of the {} QPs, and each of {} processes one pair",
            plan.qps, plan.processes
        ));
    }
    let parts = (0..plan.processes).map(|i| Part::start(&plan, i)).collect::<io::Result<Vec<_>>>();
    let parts = parts.map_err(|e| format!("starting processes: {e}"))?;
    let others = resource(&context.name, "qp").map_err(|e| format!("{e:?}"))?;
    let begin = Memory::now().map_err(|e| format!("{e:?}"))?;
    note(&format!(
        "{gids} addresses, {} connections, {} QPs, {} processes",
        2 * pairs,
        plan.qps,
        plan.processes
    ));
    Ok(Many { plan, context, parts, connections: 2 * pairs as u64, begin, others })
}

fn main() {
    let mut args = Args::from_env();
    args.help_or_list(HELP, []);
    let part: Option<usize> = args.value("--part");
    let plan = Plan::from_args(&mut args);
    args.finish();
    if let Some(part) = part {
        std::process::exit(part::serve(&plan, part));
    }
    let begun = Instant::now();
    let mut many = match start(plan) {
        Ok(many) => many,
        Err(why) => {
            eprintln!("mroce-many: {why}");
            std::process::exit(2);
        }
    };
    let mut ktap = Ktap::new(6);
    many.run(&mut ktap);
    note(&format!("{:.0} s", begun.elapsed().as_secs_f64()));
    std::process::exit(ktap.finish());
}
