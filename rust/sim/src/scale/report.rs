// SPDX-License-Identifier: GPL-2.0

//! The program: runs the cases of a file and writes tables and plots.

#![forbid(unsafe_code)]

use super::agree;
use super::fabric::{Ps, ETHERNET};
use super::png::{Line, Plot};
use super::spec::{cases, Case, KEYS};
use super::text::{parse, Section};
use super::traffic::Kind;
use super::world::{jain, run, Outcome};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How the program was called.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where tables and plots go.
    pub out: Option<PathBuf>,
    /// Settings that override those of the files.
    pub set: Vec<(String, String)>,
    /// No progress bar.
    pub quiet: bool,
    /// What was measured of the running module in the files' scenarios (CSV).
    pub against: Option<PathBuf>,
}

/// What a case gave: names and values of a table's row.
#[derive(Clone, Debug)]
pub struct Row(Vec<(String, String)>);

impl Row {
    /// A row of these columns.
    #[cfg(test)]
    pub(crate) fn of(columns: &[(&str, &str)]) -> Self {
        Self(columns.iter().map(|c| (c.0.into(), c.1.into())).collect())
    }

    /// A column's value.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|c| c.0 == name).map(|c| c.1.as_str())
    }

    /// A column's value as a number; NaN when it is none.
    pub fn number(&self, name: &str) -> f64 {
        self.get(name)
            .and_then(|v| v.parse().ok())
            .unwrap_or(f64::NAN)
    }
}

/// A bar on stderr: cases done, time in the running one.
struct Progress {
    name: String,
    of: usize,
    done: usize,
    what: String,
    began: Instant,
    shown: Instant,
    on: bool,
}

impl Progress {
    fn show(&mut self, part: f64, events: u64, now: bool) {
        if !self.on || (!now && self.shown.elapsed() < Duration::from_millis(300)) {
            return;
        }
        self.shown = Instant::now();
        let all = (self.done as f64 + part.clamp(0.0, 1.0)) / self.of.max(1) as f64;
        let full = (all * 24.0) as usize;
        let bar: String = (0..24).map(|i| if i < full { '#' } else { '.' }).collect();
        eprint!(
            "\r{} [{bar}] {}/{} {:.0} s  {} ({:.1} M events)\x1b[K",
            self.name,
            self.done,
            self.of,
            self.began.elapsed().as_secs_f64(),
            self.what,
            events as f64 / 1e6
        );
        let _ = std::io::stderr().flush();
    }
}

/// Runs the cases of a file's text and writes its tables and plots to the options' folder.
pub fn run_file(name: &str, text: &str, options: &Options) -> Result<Vec<Row>, String> {
    let sections = parse(text)?;
    let cases = cases(&sections, &options.set)?;
    let mut progress = Progress {
        name: name.into(),
        of: cases.len(),
        done: 0,
        what: String::new(),
        began: Instant::now(),
        shown: Instant::now(),
        on: !options.quiet,
    };
    let mut rows = Vec::new();
    let mut series = String::new();
    let mut sampled = Vec::new();
    let mut table: Option<std::fs::File> = None;
    if let Some(dir) = &options.out {
        std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let path = dir.join(format!("{name}.csv"));
        let f = std::fs::File::create(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        table = Some(f);
    }
    for case in &cases {
        progress.what = case
            .axes
            .iter()
            .map(|a| a.1.as_str())
            .collect::<Vec<_>>()
            .join(" ");
        progress.show(0.0, 0, true);
        let end = case.setup.end() as f64;
        let outcome = run(&case.setup, &mut |at, n| {
            progress.show(at as f64 / end, n, false);
        });
        progress.done += 1;
        let row = row(case, &outcome);
        if let Some(f) = table.as_mut() {
            let mut text = String::new();
            if rows.is_empty() {
                text += &line(row.0.iter().map(|c| c.0.as_str()));
            }
            text += &line(row.0.iter().map(|c| c.1.as_str()));
            f.write_all(text.as_bytes()).map_err(|e| e.to_string())?;
        }
        if !outcome.samples.is_empty() {
            let label = label(case);
            series += &samples(&label, &outcome, series.is_empty());
            sampled.push((label, outcome.samples.clone()));
        }
        rows.push(row);
    }
    progress.what = "done".into();
    progress.show(0.0, 0, true);
    if progress.on {
        eprintln!();
    }
    if let Some(dir) = &options.out {
        let write = |name: String, data: &[u8]| {
            let path = dir.join(name);
            std::fs::write(&path, data).map_err(|e| format!("{}: {e}", path.display()))
        };
        if !series.is_empty() {
            write(format!("{name}-series.csv"), series.as_bytes())?;
        }
        for (n, s) in sections.iter().filter(|s| s.name == "plot").enumerate() {
            let plot = plot_of_rows(s, &rows);
            write(format!("{name}-{}.png", n + 1), &plot.render())?;
        }
        for (n, s) in sections.iter().filter(|s| s.name == "series").enumerate() {
            let plot = plot_of_samples(s, &sampled);
            write(format!("{name}-series-{}.png", n + 1), &plot.render())?;
        }
    }
    expectations(&sections, &rows)?;
    if let Some(path) = &options.against {
        let text = std::fs::read_to_string(path).map_err(|e| e.to_string());
        let table = text.and_then(|t| agree::Table::parse(&t));
        let table = table.map_err(|e| format!("{}: {e}", path.display()))?;
        print!("{}", agree::judge(&sections, &rows, &table)?);
    }
    Ok(rows)
}

fn line<'a>(cells: impl Iterator<Item = &'a str>) -> String {
    let cells: Vec<&str> = cells.collect();
    cells.join(",") + "\n"
}

fn label(case: &Case) -> String {
    let parts: Vec<&str> = case.axes.iter().map(|a| a.1.as_str()).collect();
    if parts.is_empty() {
        "run".into()
    } else {
        parts.join(" ")
    }
}

fn quantile(sorted: &[Ps], q: f64) -> f64 {
    let i = ((sorted.len().max(1) - 1) as f64 * q).round() as usize;
    sorted.get(i).map_or(0.0, |t| *t as f64 / 1e6)
}

fn row(case: &Case, o: &Outcome) -> Row {
    let mut r: Vec<(String, String)> = Vec::new();
    let short = |k: &str| k.split('.').next_back().unwrap_or(k).to_string();
    if let Some(a) = case.axes.iter().find(|a| a.0 == "scenario") {
        r.push(a.clone());
    }
    for k in KEYS {
        let v = case.values.iter().find(|v| v.0 == k.0);
        let varies = case.axes.iter().any(|a| a.0 == k.0);
        if let (true, Some(v)) = (varies || k.0 == "transport.kind", v) {
            let name = if k.0 == "transport.kind" {
                "transport".to_string()
            } else {
                short(k.0)
            };
            r.push((name, v.1.clone()));
        }
    }
    let mut times = o.times.clone();
    times.sort_unstable();
    let mean = times.iter().map(|t| *t as f64).sum::<f64>() / times.len().max(1) as f64;
    let s = &case.setup;
    let job = &s.job;
    let hosts = s.layout.hosts as f64;
    // What a host could receive of payload, at most.
    let line = s.layout.down_rate * s.layout.planes as f64;
    // Payload that a host receives in an iteration, or in the time that was measured.
    let n = hosts;
    let (bytes, time, receivers) = match job.kind {
        Kind::Ring => (2.0 * (n - 1.0) / n * job.size as f64, mean, 1.0),
        Kind::AllToAll => ((n - 1.0) / n * job.size as f64, mean, 1.0),
        Kind::Incast => {
            let sum: u64 = o.received.iter().sum();
            let last = o.last.iter().max().copied().unwrap_or(0);
            (sum as f64, last as f64, 1.0)
        }
        Kind::Permutation => {
            let sum: u64 = o.sums.delivered;
            (sum as f64, o.span as f64, hosts)
        }
        Kind::Stream => {
            let sum: u64 = o.sums.delivered;
            (sum as f64, o.span as f64, 1.0)
        }
        Kind::Storage => {
            let sum: u64 = o.sums.delivered;
            (sum as f64, o.span as f64, job.senders as f64)
        }
    };
    let rate = if time > 0.0 {
        bytes * 8e12 / time / receivers
    } else {
        0.0
    };
    let rate = if o.ok { rate } else { 0.0 };
    let full = f64::from(s.host.mtu);
    let flows: Vec<u64> = match job.kind {
        Kind::Storage => o.received.iter().copied().filter(|b| *b != 0).collect(),
        _ => o.received.clone(),
    };
    let part = rate / (line * (full - 104.0) / (full + f64::from(ETHERNET)));
    let mut put = |k: &str, v: String| r.push((k.into(), v));
    put("ok", u8::from(o.ok).to_string());
    put("gbit_s", format!("{:.2}", rate / 1e9));
    put("mbit_s", format!("{:.1}", rate / 1e6));
    put("of_line", format!("{part:.4}"));
    put("time_us", format!("{:.2}", mean / 1e6));
    put("p50_us", format!("{:.2}", quantile(&times, 0.5)));
    put("p99_us", format!("{:.2}", quantile(&times, 0.99)));
    put("max_us", format!("{:.2}", quantile(&times, 1.0)));
    put("jain", format!("{:.4}", jain(&flows)));
    let each = |v: Option<&u64>| match v {
        Some(v) if o.span > 0 => format!("{:.3}", *v as f64 * 8e3 / o.span as f64),
        _ => "0".into(),
    };
    // When every sender has been told its part of the receiver's line, to a tenth.
    let fair = line / 1000.0 / job.senders.max(1) as f64;
    let settled = o.samples.iter().find(|s| {
        s.share_min != 0
            && f64::from(s.share_min) > fair * 0.85
            && f64::from(s.share_max) < fair * 1.1
    });
    let settled = settled.filter(|_| job.kind == Kind::Incast);
    put(
        "settled_us",
        settled.map_or("-".into(), |s| format!("{:.1}", s.at as f64 / 1e6)),
    );
    put("base_rtt_us", format!("{:.2}", s.base_rtt() as f64 / 1e6));
    put("flow_min_gbit_s", each(flows.iter().min()));
    put("flow_max_gbit_s", each(flows.iter().max()));
    put("dropped", o.dropped.to_string());
    put("lost", o.lost.to_string());
    put("marked", o.marked.to_string());
    put("pauses", o.pauses.to_string());
    put("queue_kb", (o.longest / 1000).to_string());
    put("host_queue_kb", (o.host_longest / 1000).to_string());
    put("packets", o.sums.packets.to_string());
    put("resent", o.sums.resent.to_string());
    put("spurious", o.spurious.to_string());
    put("cuts", o.cuts.to_string());
    put("path_failed", o.path_failed.to_string());
    let t = &o.senders;
    let ratio = |a: u64, b: u64| a as f64 / (b.max(1) as f64);
    let sent = t.counts.sent + t.counts.resent;
    put(
        "window_kb",
        format!("{:.1}", ratio(t.window, t.looks) / 1e3),
    );
    put(
        "inflight_kb",
        format!("{:.1}", ratio(t.inflight, t.looks) / 1e3),
    );
    put("srtt_us", format!("{:.0}", ratio(t.srtt, t.paths) / 1e3));
    put(
        "share_mbit",
        format!("{:.1}", ratio(t.share, t.looks) / 1e3),
    );
    put(
        "resent_part",
        format!("{:.5}", ratio(t.counts.resent, sent)),
    );
    put(
        "spurious_part",
        format!("{:.5}", ratio(t.counts.spurious, sent)),
    );
    put(
        "marked_part",
        format!("{:.5}", ratio(t.counts.marked, sent)),
    );
    put(
        "cuts_s",
        format!("{:.1}", t.counts.cuts as f64 * 1e12 / o.span.max(1) as f64),
    );
    put("faulty_part", format!("{:.4}", ratio(t.faulty, t.spines)));
    put("refused", o.sums.refused.to_string());
    put("unroutable", o.sums.unroutable.to_string());
    put("left", o.left.to_string());
    put("failed", o.failed.to_string());
    put("acks", o.acks.to_string());
    put("events", o.sums.events.to_string());
    put("wall_s", format!("{:.2}", o.wall));
    Row(r)
}

fn samples(label: &str, o: &Outcome, head: bool) -> String {
    let mut out = String::new();
    if head {
        out += "run,time_us,gbit_s,queue_kb,dropped,marked,faulty_gbit_s,window_kb,share_min_mbit,share_max_mbit,jain\n";
    }
    for s in &o.samples {
        out += &format!(
            "{label},{:.2},{:.2},{},{},{},{:.3},{},{},{},{:.4}\n",
            s.at as f64 / 1e6,
            s.rate / 1e9,
            s.queue / 1000,
            s.dropped,
            s.marked,
            s.faulty / 1e9,
            s.window / 1000,
            s.share_min / 1000,
            s.share_max / 1000,
            s.jain
        );
    }
    out
}

/// Values of an axis as numbers, units understood.
fn axis(text: &str) -> f64 {
    use super::text::{bytes, number, rate, time};
    number(text)
        .or_else(|_| bytes(text))
        .or_else(|_| rate(text))
        .or_else(|_| time(text).map(|t| t / 1e12))
        .unwrap_or(f64::NAN)
}

fn plot_of_rows(s: &Section, rows: &[Row]) -> Plot {
    let (x, y) = (s.one("x").unwrap_or("size"), s.one("y").unwrap_or("gbit_s"));
    let by: Vec<&str> = s.get("lines").map_or(vec!["transport"], |v| {
        v.iter().map(String::as_str).collect()
    });
    let mut lines: Vec<Line> = Vec::new();
    for r in rows {
        let wanted = s.get("where").is_none_or(|w| {
            w.iter()
                .all(|c| c.split_once('=').is_none_or(|(k, v)| r.get(k) == Some(v)))
        });
        if !wanted {
            continue;
        }
        let name: Vec<&str> = by.iter().filter_map(|k| r.get(k)).collect();
        let name = name.join(" ");
        let point = (axis(r.get(x).unwrap_or("")), r.number(y));
        if !point.0.is_finite() || !point.1.is_finite() {
            continue;
        }
        match lines.iter_mut().find(|l| l.name == name) {
            Some(l) => l.points.push(point),
            None => lines.push(Line {
                name,
                points: vec![point],
            }),
        }
    }
    Plot {
        title: s.one("title").unwrap_or("").into(),
        x: s.one("x_title").unwrap_or(x).into(),
        y: s.one("y_title").unwrap_or(y).into(),
        log_x: s.one("log_x") == Some("true"),
        log_y: s.one("log_y") == Some("true"),
        lines,
    }
}

fn plot_of_samples(s: &Section, all: &[(String, Vec<super::world::Sample>)]) -> Plot {
    let y = s.one("y").unwrap_or("gbit_s");
    let lines = all
        .iter()
        .map(|(name, samples)| Line {
            name: name.clone(),
            points: samples
                .iter()
                .map(|s| {
                    let v = match y {
                        "queue_kb" => s.queue as f64 / 1e3,
                        "faulty_gbit_s" => s.faulty / 1e9,
                        "share_max_mbit" => f64::from(s.share_max) / 1e3,
                        "window_kb" => s.window as f64 / 1e3,
                        "jain" => s.jain,
                        _ => s.rate / 1e9,
                    };
                    (s.at as f64 / 1e6, v)
                })
                .collect(),
        })
        .collect();
    Plot {
        title: s.one("title").unwrap_or("").into(),
        x: "time, us".into(),
        y: s.one("y_title").unwrap_or(y).into(),
        log_x: false,
        log_y: false,
        lines,
    }
}

/// `[[expect]]`: `where` (conditions `column=value`), `column`, and `least`, `most` as numbers
/// or as `factor column-value of the row with where...`: see README.md.
fn expectations(sections: &[Section], rows: &[Row]) -> Result<(), String> {
    let fits = |r: &Row, conditions: &[String]| {
        conditions
            .iter()
            .all(|c| c.split_once('=').is_none_or(|(k, v)| r.get(k) == Some(v)))
    };
    let mut bad = Vec::new();
    for s in sections.iter().filter(|s| s.name == "expect") {
        let column = s.one("column").ok_or("expect: column is missing")?;
        let conditions = s.get("where").unwrap_or(&[]);
        let chosen: Vec<&Row> = rows.iter().filter(|r| fits(r, conditions)).collect();
        if chosen.is_empty() {
            bad.push(format!("no row is where {conditions:?}"));
        }
        for r in chosen {
            let v = r.number(column);
            // Compared with another row: the same but for what `against` says.
            let scale = match s.get("against") {
                None => 1.0,
                Some(other) => {
                    let same = |o: &&Row| {
                        fits(o, other)
                            && r.0.iter().take_while(|c| c.0 != "ok").all(|c| {
                                o.get(&c.0) == Some(c.1.as_str())
                                    || other.iter().any(|x| x.starts_with(&format!("{}=", c.0)))
                            })
                    };
                    rows.iter()
                        .find(same)
                        .map_or(f64::NAN, |o| o.number(column))
                }
            };
            for (key, sign) in [("least", 1.0), ("most", -1.0)] {
                let Some(bound) = s.one(key) else { continue };
                let bound: f64 = bound.parse().map_err(|_| format!("expect: {bound:?}"))?;
                let bound = bound * scale;
                let holds = (v - bound) * sign >= 0.0;
                if !holds {
                    let of: Vec<String> =
                        r.0.iter()
                            .take_while(|c| c.0 != "ok")
                            .map(|c| format!("{}={}", c.0, c.1))
                            .collect();
                    bad.push(format!(
                        "{}: {column} is {v}, {key} {bound:.4}",
                        of.join(" ")
                    ));
                }
            }
        }
    }
    if bad.is_empty() {
        Ok(())
    } else {
        Err(format!("not as expected:\n  {}", bad.join("\n  ")))
    }
}

const HELP: &str = "\
usage: metaroce-sim [options] FILE...

Runs the simulations that the files describe (TOML; every setting that is given as an array
is varied) and writes FILE.csv, FILE-series.csv and plots.

  --out DIR            where they go (default: sim-out)
  --set KEY=VALUE      overrides a setting, such as --set run.seed=2 or
                       --set transport.kind=metaroce,ideal
  --quiet              no progress bar
  --against FILE       compares with what was measured of the running module in the same
                       scenarios (CSV, selftests/compare.sh), as the files' [[agree]] say
  --settings           lists the settings with their defaults

The status is 1 when a file's [[expect]] does not hold, or the module does not agree.
";

/// The program. Gives its exit status.
pub fn main(args: &[String]) -> i32 {
    let mut options = Options {
        out: Some("sim-out".into()),
        ..Options::default()
    };
    let mut files = Vec::new();
    let mut args = args.iter();
    while let Some(a) = args.next() {
        match a.as_str() {
            "--help" | "-h" => {
                print!("{HELP}");
                return 0;
            }
            "--settings" => {
                for (k, d, what) in KEYS {
                    println!("{k:<24} {d:<12} {what}");
                }
                return 0;
            }
            "--quiet" => options.quiet = true,
            "--against" => match args.next() {
                Some(f) => options.against = Some(f.into()),
                None => files.clear(),
            },
            "--out" => match args.next() {
                Some(d) => options.out = Some(d.into()),
                None => files.clear(),
            },
            "--set" => match args.next().and_then(|s| s.split_once('=')) {
                Some((k, v)) => options.set.push((k.into(), v.into())),
                None => {
                    eprintln!("--set needs KEY=VALUE");
                    return 2;
                }
            },
            _ if a.starts_with('-') => {
                eprintln!("{a} is unknown\n{HELP}");
                return 2;
            }
            _ => files.push(PathBuf::from(a)),
        }
    }
    if files.is_empty() {
        eprint!("{HELP}");
        return 2;
    }
    let mut status = 0;
    for f in &files {
        let name = f.file_stem().map_or("run".into(), |s| s.to_string_lossy());
        let result = std::fs::read_to_string(f)
            .map_err(|e| e.to_string())
            .and_then(|text| run_file(&name, &text, &options));
        match result {
            Ok(rows) if options.against.is_none() => show(&name, &rows),
            Ok(_) => {}
            Err(e) => {
                eprintln!("{}: {e}", f.display());
                status = 1;
            }
        }
    }
    status
}

/// The columns that matter, on stdout.
fn show(name: &str, rows: &[Row]) {
    println!("{name}");
    let Some(first) = rows.first() else { return };
    let axes: Vec<&str> = first
        .0
        .iter()
        .take_while(|c| c.0 != "ok")
        .map(|c| c.0.as_str())
        .collect();
    let columns: Vec<&str> = axes
        .iter()
        .copied()
        .chain([
            "ok", "gbit_s", "of_line", "time_us", "p99_us", "jain", "dropped", "lost", "resent",
            "queue_kb", "wall_s",
        ])
        .collect();
    for c in &columns {
        print!("{c:>12}");
    }
    println!();
    for r in rows {
        for c in &columns {
            print!("{:>12}", r.get(c).unwrap_or(""));
        }
        println!();
    }
}
