// SPDX-License-Identifier: GPL-2.0

//! A file's rows beside the same quantities of the running module: do they agree?
//!
//! The module's are a table (CSV) whose column `scenario` names the file's scenarios; a scenario
//! with several rows, on either side, counts by its medians. What is compared, and how far it may
//! differ, is in the file: `[[agree]]` with
//!
//! - `columns`: those it is about,
//! - `scenarios`: those it is about (default: all),
//! - `within`: the difference allowed, as a part of the greater of the two values,
//! - `beyond`: and, added to it, in the column's own unit (default: 0),
//! - `why`: the cause of a difference that is known.
//!
//! The last section that is about a column and a scenario counts.

#![forbid(unsafe_code)]

use super::report::Row;
use super::text::{number, Section};
use std::fmt::Write as _;

/// A table that was measured.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Reads CSV without quotes; the first line names the columns.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let cells = |l: &str| l.split(',').map(|c| c.trim().to_string()).collect();
        let mut lines = text.lines().filter(|l| !l.trim().is_empty());
        let columns: Vec<String> = lines.next().map(cells).ok_or("no line with names")?;
        if !columns.iter().any(|c| c == "scenario") {
            return Err("no column is named scenario".into());
        }
        let rows: Vec<Vec<String>> = lines.map(cells).collect();
        match rows.iter().position(|r| r.len() != columns.len()) {
            None => Ok(Self { columns, rows }),
            Some(n) => Err(format!("row {} has not as many cells as the first", n + 2)),
        }
    }

    /// The median of a scenario's values.
    fn median(&self, scenario: &str, column: &str) -> Option<f64> {
        let at = |name: &str| self.columns.iter().position(|c| c == name);
        let (key, value) = (at("scenario")?, at(column)?);
        let rows = self.rows.iter().filter(|r| r[key] == scenario);
        median(rows.map(|r| r[value].parse().unwrap_or(f64::NAN)))
    }
}

/// The median; nothing when there is no value, or one that is no number.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut all: Vec<f64> = values.collect();
    if all.iter().any(|v| v.is_nan()) {
        return None;
    }
    all.sort_by(f64::total_cmp);
    let (low, high) = (all.len().checked_sub(1)? / 2, all.len() / 2);
    Some((all[low] + all[high]) / 2.0)
}

fn simulated(rows: &[Row], scenario: &str, column: &str) -> Option<f64> {
    let rows = rows.iter().filter(|r| r.get("scenario") == Some(scenario));
    median(rows.map(|r| r.number(column)))
}

/// What a section allows for a column of a scenario.
struct Allowed {
    within: f64,
    beyond: f64,
    why: String,
}

fn allowed(sections: &[&Section], scenario: &str, column: &str) -> Result<Option<Allowed>, String> {
    let holds = |s: &Section, key: &str, name: &str| match s.get(key) {
        None => key == "scenarios",
        Some(list) => list.iter().any(|x| x == name),
    };
    let Some(s) = sections
        .iter()
        .rev()
        .find(|s| holds(s, "columns", column) && holds(s, "scenarios", scenario))
    else {
        return Ok(None);
    };
    Ok(Some(Allowed {
        within: number(s.one("within").ok_or("agree: within is missing")?)?,
        beyond: number(s.one("beyond").unwrap_or("0"))?,
        why: s.one("why").unwrap_or_default().into(),
    }))
}

/// Judges, and gives the two tables side by side. The error has them as well.
pub(super) fn judge(
    sections: &[Section],
    rows: &[Row],
    measured: &Table,
) -> Result<String, String> {
    let agree: Vec<&Section> = sections.iter().filter(|s| s.name == "agree").collect();
    let mut columns: Vec<&str> = Vec::new();
    for s in &agree {
        for c in s.get("columns").ok_or("agree: columns is missing")? {
            if !columns.contains(&c.as_str()) {
                columns.push(c);
            }
        }
    }
    let scenarios: Vec<&str> = (sections.iter())
        .filter(|s| s.name == "scenario")
        .filter_map(|s| s.one("name"))
        .collect();
    if columns.is_empty() || scenarios.is_empty() {
        return Err("nothing is to be compared: [[scenario]] and [[agree]] say what".into());
    }
    let mut text = format!(
        "{:<20} {:<14} {:>10} {:>10} {:>9} {:>9}\n",
        "scenario", "quantity", "module", "simulator", "differs", "allowed"
    );
    let (mut bad, mut whys) = (0, Vec::new());
    for scenario in scenarios {
        for column in &columns {
            let Some(a) = allowed(&agree, scenario, column)? else {
                continue;
            };
            let sim = simulated(rows, scenario, column);
            let real = measured.median(scenario, column);
            let (Some(sim), Some(real)) = (sim, real) else {
                let which = if sim.is_none() { "simulator" } else { "module" };
                let _ = writeln!(text, "{scenario:<20} {column:<14} no value of the {which}");
                bad += 1;
                continue;
            };
            let difference = (sim - real).abs();
            let bound = a.within * sim.abs().max(real.abs()) + a.beyond;
            let agrees = difference <= bound;
            bad += u32::from(!agrees);
            let mark = match (agrees, a.why.is_empty()) {
                (false, _) => " !".into(),
                (true, true) => String::new(),
                (true, false) => {
                    let place = whys.iter().position(|w| *w == a.why).unwrap_or_else(|| {
                        whys.push(a.why.clone());
                        whys.len() - 1
                    });
                    format!(" ({})", place + 1)
                }
            };
            let [real, sim, difference, bound] = [real, sim, difference, bound].map(figure);
            let _ = writeln!(
                text,
                "{scenario:<20} {column:<14} {real:>10} {sim:>10} {difference:>9} {bound:>9}{mark}"
            );
        }
    }
    for (n, why) in whys.iter().enumerate() {
        let _ = writeln!(text, "({}) {why}", n + 1);
    }
    match bad {
        0 => Ok(text),
        n => Err(format!(
            "module and simulator differ in {n} places (!):\n{text}"
        )),
    }
}

/// A number in few characters.
fn figure(v: f64) -> String {
    match v.abs() {
        x if x >= 100.0 => format!("{v:.0}"),
        x if x >= 1.0 => format!("{v:.2}"),
        _ => format!("{v:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::parse;
    use super::*;

    const FILE: &str = r#"
[[scenario]]
name = "one"
[[scenario]]
name = "two"
[[agree]]
columns = ["rate", "loss"]
within = "10%"
[[agree]]
scenarios = "two"
columns = "loss"
within = 0
beyond = 0.5
why = "half a packet"
"#;

    fn row(scenario: &str, rate: &str, loss: &str) -> Row {
        Row::of(&[("scenario", scenario), ("rate", rate), ("loss", loss)])
    }

    fn judged(measured: &str) -> Result<String, String> {
        let rows = [
            row("one", "100", "0"),
            row("one", "104", "0"),
            row("two", "50", "2"),
        ];
        let table = Table::parse(measured).expect("a table");
        judge(&parse(FILE).expect("a file"), &rows, &table)
    }

    #[test]
    fn medians_within_tolerance_agree() {
        let text = judged("scenario,rate,loss\none,95,0\none,12,0\none,99,0\ntwo,50,2.4\n");
        let text = text.expect("agrees");
        assert!(text.contains("95") && text.contains("102"), "{text}");
        assert!(text.contains("(1) half a packet"), "{text}");
    }

    #[test]
    fn beyond_it_they_do_not() {
        for (measured, places) in [
            ("one,90,0\ntwo,50,2\n", 1),
            ("one,100,0\ntwo,50,2.6\n", 1),
            ("one,150,1\ntwo,50,1.4\n", 3),
        ] {
            let text = judged(&format!("scenario,rate,loss\n{measured}")).expect_err(measured);
            assert!(text.contains(&format!("in {places} places")), "{text}");
            assert_eq!(text.matches(" !\n").count(), places, "{text}");
        }
    }

    #[test]
    fn what_is_missing_does_not_agree() {
        for measured in ["one,100,0\n", "one,100,0\ntwo,50,\n"] {
            let text = judged(&format!("scenario,rate,loss\n{measured}")).expect_err(measured);
            assert!(text.contains("no value of the module"), "{text}");
        }
        let text = judged("scenario,rate\none,100\ntwo,50\n").expect_err("a column less");
        assert!(text.contains("no value of the module"), "{text}");
        for bad in ["", "rate\n1\n", "scenario,rate\none\n"] {
            Table::parse(bad).expect_err(bad);
        }
    }
}
