// SPDX-License-Identifier: GPL-2.0

//! Run files: the part of TOML that they need. Sections, keys, strings, numbers, booleans and
//! arrays of them on one line or several; `[[section]]` may come more than once.

#![forbid(unsafe_code)]

/// A section: its name, and keys with one or more values, as text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Section {
    pub(crate) name: String,
    pub(crate) keys: Vec<(String, Vec<String>)>,
}

impl Section {
    pub(crate) fn get(&self, key: &str) -> Option<&[String]> {
        self.keys
            .iter()
            .find(|k| k.0 == key)
            .map(|k| k.1.as_slice())
    }

    pub(crate) fn one(&self, key: &str) -> Option<&str> {
        self.get(key)?.first().map(String::as_str)
    }
}

/// Reads a file's text. Errors name the line.
pub(crate) fn parse(text: &str) -> Result<Vec<Section>, String> {
    let mut sections = vec![Section::default()];
    let mut lines = text.lines().enumerate();
    while let Some((n, line)) = lines.next() {
        let bad = |what: &str| format!("line {}: {what}", n + 1);
        let line = uncommented(line);
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let name = name.trim_start_matches('[').trim_end_matches(']').trim();
            let many = line.starts_with("[[");
            if !many && sections.iter().any(|s| s.name == name) {
                return Err(bad("this section is there already"));
            }
            sections.push(Section {
                name: name.into(),
                keys: Vec::new(),
            });
            continue;
        }
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| bad("expected key = value"))?;
        let mut value = value.trim().to_string();
        if value.starts_with('[') {
            while !value.ends_with(']') {
                let (_, more) = lines.next().ok_or_else(|| bad("the array does not end"))?;
                value.push_str(uncommented(more).trim());
            }
        }
        let values = match value.strip_prefix('[').and_then(|v| v.strip_suffix(']')) {
            Some(list) => split(list),
            None => vec![value],
        };
        let values: Vec<String> = values
            .iter()
            .map(|v| v.trim().trim_matches('"').to_string())
            .collect();
        let section = sections.last_mut().ok_or_else(|| bad("no section"))?;
        section.keys.push((key.trim().into(), values));
    }
    Ok(sections)
}

/// The line without its comment.
fn uncommented(line: &str) -> String {
    let mut quoted = false;
    line.chars()
        .take_while(|c| {
            quoted ^= *c == '"';
            quoted || *c != '#'
        })
        .collect()
}

/// Splits at commas outside of strings.
fn split(list: &str) -> Vec<String> {
    let mut quoted = false;
    let mut out = vec![String::new()];
    for c in list.chars() {
        quoted ^= c == '"';
        if c == ',' && !quoted {
            out.push(String::new());
        } else if let Some(last) = out.last_mut() {
            last.push(c);
        }
    }
    out.retain(|v| !v.trim().is_empty());
    out
}

/// A number with a unit from a list of (suffix, factor).
fn scaled(text: &str, units: &[(&str, f64)]) -> Result<f64, String> {
    let digits = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim();
    let value: f64 = number
        .replace('_', "")
        .parse()
        .map_err(|_| format!("{text:?} is no number"))?;
    let factor = units.iter().find(|u| u.0 == unit);
    let factor = factor.ok_or_else(|| {
        let known: Vec<&str> = units.iter().map(|u| u.0).collect();
        format!("{text:?}: the unit is not one of {known:?}")
    })?;
    Ok(value * factor.1)
}

/// Bytes: K, M and G are powers of 1024.
pub(crate) fn bytes(text: &str) -> Result<f64, String> {
    let k = 1024.0;
    scaled(text, &[("", 1.0), ("K", k), ("M", k * k), ("G", k * k * k)])
}

/// Bit/s.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    scaled(text, &[("", 1.0), ("M", 1e6), ("G", 1e9)])
}

/// Time in ps.
pub(crate) fn time(text: &str) -> Result<f64, String> {
    scaled(
        text,
        &[
            ("ns", 1e3),
            ("us", 1e6),
            ("ms", 1e9),
            ("s", 1e12),
            ("", 1e12),
        ],
    )
}

/// A number without unit, or with %.
pub(crate) fn number(text: &str) -> Result<f64, String> {
    scaled(text, &[("", 1.0), ("%", 0.01)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_is_needed() {
        let s = parse("a = 1 # x\n[b]\nc = [\"1,2\", 3]\nd = [1,\n 2]\n[[e]]\nf = \"#\"\n[[e]]\n")
            .expect("well-formed");
        assert_eq!(s.len(), 4);
        assert_eq!(s[0].one("a"), Some("1"));
        assert_eq!(s[1].get("c").expect("there"), ["1,2", "3"]);
        assert_eq!(s[1].get("d").expect("there").len(), 2);
        assert_eq!(s[2].one("f"), Some("#"));
        assert_eq!(bytes("64K"), Ok(65536.0));
        assert_eq!(rate("400G"), Ok(4e11));
        assert_eq!(time("1.5us"), Ok(1.5e6));
        assert!(time("5 parsec").is_err());
        assert!(parse("x").is_err());
    }
}
