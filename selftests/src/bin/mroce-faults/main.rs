// SPDX-License-Identifier: GPL-2.0
//! mroce-faults: each verb is called again and again while one allocation after the other, and
//! one copy from or to user space after the other, fails in the kernel. Each time the call
//! gives an errno or works all the same, a request that had begun ends, and the next call,
//! without a fault, works; in the end nothing is left. Needs a kernel with fault injection
//! (/proc/thread-self/fail-nth), and one device, which talks to itself.

#![forbid(unsafe_code)]

use selftests::args::Args;
use selftests::dv::{self, Dv};
use selftests::endpoint::{choose_gid, Device, ALL_ACCESS};
use selftests::ktap::{note, Ktap, Outcome, Stop};
use selftests::sys::{self, Memory};
use selftests::verbs::{self, Connect, Context, Pd, Qp, QpInit, SendWr};
use selftests::{check, skip};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

const HELP: &str = "\
usage: mroce-faults [--dev NAME] [--gid INDEX] [--most N] [CASE...]

  --most N   faults that a case tries at the most (default 2000)

CASE is a name or the beginning of one. Results are KTAP. Root.
";

/// Lets the n-th chance for a fault of this thread fail.
struct Faults {
    file: File,
    /// Whether the last order has been carried out, once it is taken back.
    injected: Option<bool>,
}

impl Faults {
    fn new() -> Outcome<Self> {
        let Ok(file) = OpenOptions::new().read(true).write(true).open("/proc/thread-self/fail-nth") else {
            skip!("this kernel injects no faults");
        };
        // A network namespace of `ip netns` has a /sys of its own.
        let debug = std::path::Path::new("/sys/kernel/debug");
        if !debug.join("failslab").exists() {
            let _ = std::process::Command::new("mount").args(["-t", "debugfs", "none"]).arg(debug).status();
        }
        // Also where the caller would wait for memory; single pages, too; without a word.
        for (kind, knob, value) in [
            ("failslab", "ignore-gfp-wait", "N"),
            ("failslab", "verbose", "0"),
            ("fail_page_alloc", "ignore-gfp-wait", "N"),
            ("fail_page_alloc", "min-order", "0"),
            ("fail_page_alloc", "verbose", "0"),
            ("fail_usercopy", "verbose", "0"),
        ] {
            let path = format!("/sys/kernel/debug/{kind}/{knob}");
            std::fs::write(&path, value).map_err(|e| format!("{path}: {e}"))?;
        }
        Ok(Faults { file, injected: None })
    }

    fn set(&mut self, n: u32) -> io::Result<()> {
        self.injected = None;
        // The file knows no seeking.
        self.file.write_at(n.to_string().as_bytes(), 0).map(drop)
    }

    /// Takes the order back, if that has not been done; true when it has been carried out.
    fn end(&mut self) -> bool {
        if let Some(injected) = self.injected {
            return injected;
        }
        let mut room = [0; 16];
        let left = self.file.read_at(&mut room, 0);
        let _ = self.set(0);
        let injected = left.is_ok_and(|n| room[..n].trim_ascii() == b"0");
        self.injected = Some(injected);
        injected
    }
}

struct Rig {
    device: Option<String>,
    context: Arc<Context>,
    pd: Arc<Pd>,
    memory: Arc<Memory>,
    dv: Dv,
    gid: (u32, [u8; 16]),
    mtu: u32,
    /// Error completions, by what they say.
    failed: RefCell<BTreeMap<String, u32>>,
}

fn with_errno(what: io::Result<()>) -> Outcome<bool> {
    match what {
        Ok(()) => Ok(true),
        Err(e) => {
            check!(e.raw_os_error().is_some_and(|n| n > 0), "an error without errno: {e}");
            Ok(false)
        }
    }
}

/// Calls `op` until no fault is left to inject.
fn walk(faults: &mut Faults, most: u32, mut op: impl FnMut(&mut Faults) -> io::Result<()>) -> Outcome {
    // What is made once is there.
    op(faults).map_err(|e| format!("without a fault: {e}"))?;
    let (mut failed, mut survived) = (0, 0);
    for n in 1..=most {
        faults.set(n).map_err(|e| e.to_string())?;
        let result = op(faults);
        if !faults.end() {
            // There were fewer chances than that.
            check!(result.is_ok(), "fault {n} was not injected, but {result:?}");
            note(&format!("{} faults: {failed} calls failed, {survived} worked all the same", n - 1));
            return Ok(());
        }
        if with_errno(result)? {
            survived += 1;
        } else {
            failed += 1;
        }
        if n % 16 == 0 {
            op(faults).map_err(|e| format!("after fault {n}, without one: {e}"))?;
        }
    }
    op(faults).map_err(|e| format!("without a fault, afterwards: {e}"))?;
    note(&format!("{most} faults and no end: {failed} calls failed, {survived} worked all the same"));
    Ok(())
}

impl Rig {
    fn new(device: &Device) -> Outcome<Self> {
        let text = |e: io::Error| Stop::Fail(e.to_string());
        let context = Context::open(device.name.as_deref()).map_err(text)?;
        Ok(Rig {
            device: device.name.clone(),
            pd: context.alloc_pd().map_err(text)?,
            memory: Arc::new(Memory::new(1 << 20).map_err(text)?),
            dv: Dv::load().map_err(text)?,
            gid: choose_gid(&context, device).map_err(text)?,
            mtu: context.query_port(1).map_err(text)?.active_mtu,
            failed: RefCell::default(),
            context,
        })
    }

    fn qp(&self) -> io::Result<Arc<Qp>> {
        let cq = self.context.create_cq(64, None)?;
        self.pd.create_qp(&QpInit::rc(&cq, &cq, 16, 4, 64))
    }

    fn connect(&self, to: &Qp) -> Connect {
        Connect { timeout: 16, rnr_retry: 1, ..Connect::to_own(to.number, self.gid, self.mtu) }
    }

    /// Two QPs of the device that are connected with each other.
    fn pair(&self) -> io::Result<(Arc<Qp>, Arc<Qp>)> {
        let (a, b) = (self.qp()?, self.qp()?);
        self.join(&a, &b)?;
        Ok((a, b))
    }

    fn join(&self, a: &Qp, b: &Qp) -> io::Result<()> {
        for (qp, to) in [(a, b), (b, a)] {
            let connect = self.connect(to);
            qp.init(ALL_ACCESS)?;
            qp.to_rtr(&connect)?;
            qp.to_rts(&connect)?;
        }
        Ok(())
    }

    /// All that the extensions can be asked, with as many paths as there can be.
    fn extensions(&self) -> io::Result<()> {
        let (a, b) = (self.qp()?, self.qp()?);
        let paths = dv::METAROCE_MAX_PATHS;
        self.dv.modify(&a, &dv::QpAttr { mask: dv::METAROCE_QP_PATHS, paths, ..Default::default() })?;
        self.join(&a, &b)?;
        self.dv.modify(&a, &dv::QpAttr { mask: dv::METAROCE_QP_EVENTS, events: 1, ..Default::default() })?;
        self.dv.paths(&a)?;
        self.dv.transitions(&a, &mut 0, dv::METAROCE_MAX_TRANSITIONS as usize).map(drop)
    }

    /// One request of each kind over a fresh pair; all end. An error of the request is as
    /// good as one of the call.
    fn traffic(&self, faults: &mut Faults) -> io::Result<()> {
        let mr = self.pd.reg(&self.memory, ALL_ACCESS)?;
        let (a, b) = self.pair()?;
        b.post_recv(5, &[mr.sge(0, 4096)])?;
        let wr = |wr_id, opcode, len| SendWr {
            wr_id,
            opcode,
            sges: vec![mr.sge(8192, len)],
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: mr.addr(65536),
            rkey: mr.rkey,
            compare_add: 1,
            ..SendWr::default()
        };
        let list = [
            wr(0, verbs::IBV_WR_RDMA_WRITE, 60_000),
            wr(1, verbs::IBV_WR_RDMA_READ, 5000),
            wr(2, verbs::IBV_WR_ATOMIC_FETCH_AND_ADD, 8),
            wr(3, verbs::IBV_WR_SEND, 1000),
        ];
        let posted = a.post_send(&list);
        // What follows has no part of the kernel's in it: its system calls read the clock.
        faults.end();
        posted.map_err(|e| e.error)?;
        let mut error = false;
        for id in 0..4 {
            match a.send_cq.poll_one(Duration::from_secs(20))? {
                Some(wc) if wc.wr_id != id => return Err(io::Error::other("completions out of order")),
                Some(wc) if wc.status != verbs::IBV_WC_SUCCESS => {
                    *self.failed.borrow_mut().entry(verbs::status_name(wc.status)).or_default() += 1;
                    error = true;
                }
                Some(_) => {}
                None => return Err(io::Error::other("a request does not end")),
            }
        }
        if error {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        Ok(())
    }
}

const ENODEV: i32 = 19;
/// Stands for error completions.
const EIO: i32 = 5;

type Case = (&'static str, fn(&Rig, &mut Faults) -> io::Result<()>);

const CASES: &[Case] = &[
    ("case06_open_device", |r, _| {
        // libibverbs does not list a device of which it could not read all.
        let plain =
            |e: io::Error| if e.raw_os_error().is_some() { e } else { io::Error::from_raw_os_error(ENODEV) };
        Context::open(r.device.as_deref()).map(drop).map_err(plain)
    }),
    ("case06_alloc_pd", |r, _| r.context.alloc_pd().map(drop)),
    ("case06_reg_mr", |r, _| r.pd.reg(&r.memory, ALL_ACCESS).map(drop)),
    ("case06_rereg_mr", |r, _| r.pd.reg(&r.memory, ALL_ACCESS)?.rereg_access(verbs::IBV_ACCESS_LOCAL_WRITE)),
    ("case06_rereg_mr_in_all", |r, _| {
        let (pd, memory) = (r.context.alloc_pd()?, Memory::new(1 << 16)?);
        r.pd.reg(&r.memory, ALL_ACCESS)?.rereg_all(&pd, &memory, ALL_ACCESS)
    }),
    ("case06_create_channel", |r, _| r.context.create_channel().map(drop)),
    ("case06_create_cq", |r, _| r.context.create_cq(100, None).map(drop)),
    ("case06_create_cq_with_channel", |r, _| {
        let channel = r.context.create_channel()?;
        r.context.create_cq(100, Some(&channel)).map(drop)
    }),
    ("case06_resize_cq", |r, _| r.context.create_cq(100, None)?.resize(5000)),
    ("case06_create_srq", |r, _| r.pd.create_srq(100, 2).map(drop)),
    ("case06_srq_attributes", |r, _| {
        let srq = r.pd.create_srq(100, 2)?;
        srq.set_limit(5)?;
        srq.limit().map(drop)
    }),
    ("case06_create_qp", |r, _| r.qp().map(drop)),
    ("case06_create_qp_with_srq", |r, _| {
        let cq = r.context.create_cq(16, None)?;
        let srq = r.pd.create_srq(16, 1)?;
        let init = QpInit { srq: Some(srq), ..QpInit::rc(&cq, &cq, 16, 1, 0) };
        r.pd.create_qp(&init).map(drop)
    }),
    ("case06_modify_qp", |r, _| r.pair().map(drop)),
    ("case06_states_of_a_qp", |r, _| {
        let (a, b) = r.pair()?;
        a.set_state(verbs::IBV_QPS_SQD)?;
        a.set_state(verbs::IBV_QPS_RTS)?;
        for qp in [a, b] {
            qp.set_state(verbs::IBV_QPS_ERR)?;
            qp.set_state(verbs::IBV_QPS_RESET)?;
            qp.init(ALL_ACCESS)?;
        }
        Ok(())
    }),
    ("case06_extensions", |r, _| r.extensions()),
    ("case06_query", |r, _| {
        r.context.query_device()?;
        r.context.query_port(1)?;
        r.context.gids()?;
        r.qp()?.query(verbs::IBV_QP_STATE).map(drop)
    }),
    ("case06_traffic", Rig::traffic),
];

fn left(device: &str) -> String {
    let out = std::process::Command::new("rdma").args(["resource", "show", device]).output();
    out.map_or(String::new(), |o| String::from_utf8_lossy(&o.stdout).into_owned())
}

fn main() {
    let mut args = Args::from_env();
    args.help_or_list(HELP, CASES.iter().map(|c| c.0));
    let device = Device::from_args(&mut args);
    let most = args.value("--most").unwrap_or(2000);
    let one = args.flag("--one");
    let words = args.positionals();
    args.finish();
    let wanted = |name: &str| {
        words.is_empty() || words.iter().any(|w| if one { name == w } else { name.starts_with(w.as_str()) })
    };
    let cases: Vec<&Case> = CASES.iter().filter(|c| wanted(c.0)).collect();
    if one {
        // The process that meets the faults: calls that free things fail as well, and what
        // they leave goes with it.
        let result = cases.first().map_or(Ok(()), |(_, op)| {
            let mut faults = Faults::new()?;
            let rig = Rig::new(&device)?;
            let result = walk(&mut faults, most, |faults| op(&rig, faults));
            let _ = faults.set(0);
            for (status, n) in rig.failed.borrow().iter() {
                note(&format!("{n} completions with {status}"));
            }
            result
        });
        std::process::exit(match result {
            Ok(()) => 0,
            Err(Stop::Skip(why)) => {
                note(&why);
                4
            }
            Err(Stop::Fail(why)) => {
                note(&why);
                1
            }
        });
    }
    // What the kernel makes for the processes below is told by this name from what they cause
    // (see qemu-test/leaks).
    let _ = std::fs::write("/proc/self/comm", "faults-parent");
    let mut ktap = Ktap::new(cases.len());
    let name_of = device.name.clone().unwrap_or_default();
    for (name, _) in cases {
        ktap.run(name, || {
            let before = left(&name_of);
            let me = std::env::current_exe().map_err(|e| e.to_string())?;
            let mut command = std::process::Command::new(me);
            command.args(["--one", name, "--most", &most.to_string(), "--dev", &name_of]);
            let status = command.status().map_err(|e| e.to_string())?;
            if status.code() == Some(4) {
                skip!("this kernel injects no faults");
            }
            check!(status.success(), "it ended with {status}");
            let same = || left(&name_of) == before;
            check!(
                sys::busywait(Duration::from_secs(10), same),
                "left: {}, before: {before}",
                left(&name_of)
            );
            Ok(())
        });
    }
    std::process::exit(ktap.finish());
}
