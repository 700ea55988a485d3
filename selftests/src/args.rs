// SPDX-License-Identifier: GPL-2.0
//! Command lines: `--name value`, `--name=value` and `--flag`.

#![forbid(unsafe_code)]

use std::str::FromStr;

/// The words of a command line that were not taken yet.
pub struct Args {
    words: Vec<String>,
}

impl Args {
    /// The words of this process, without its name.
    pub fn from_env() -> Self {
        Args { words: std::env::args().skip(1).collect() }
    }

    /// Takes `--name VALUE` or `--name=VALUE`.
    pub fn text(&mut self, name: &str) -> Option<String> {
        let prefix = format!("{name}=");
        let at = self.words.iter().position(|w| w == name || w.starts_with(&prefix))?;
        let word = self.words.remove(at);
        if let Some(value) = word.strip_prefix(&prefix) {
            return Some(value.to_string());
        }
        if at < self.words.len() {
            return Some(self.words.remove(at));
        }
        usage(&format!("{name} needs a value"))
    }

    /// Takes a value that parses as `T`.
    pub fn value<T: FromStr>(&mut self, name: &str) -> Option<T> {
        self.text(name).map(|text| match text.parse() {
            Ok(value) => value,
            Err(_) => usage(&format!("{name}: cannot read '{text}'")),
        })
    }

    /// Takes a size in bytes: decimal, with an optional suffix k, m or g (powers of 1024).
    pub fn size(&mut self, name: &str) -> Option<u64> {
        self.text(name).map(|text| match parse_size(&text) {
            Some(value) => value,
            None => usage(&format!("{name}: '{text}' is no size")),
        })
    }

    /// Takes `--name`.
    pub fn flag(&mut self, name: &str) -> bool {
        match self.words.iter().position(|w| w == name) {
            Some(at) => {
                self.words.remove(at);
                true
            }
            None => false,
        }
    }

    /// Answers `--help` with `help` and `--list` with a line for each of `names`; either ends
    /// the program.
    pub fn help_or_list<'a>(&mut self, help: &str, names: impl IntoIterator<Item = &'a str>) {
        if self.flag("--help") {
            print!("{help}");
        } else if self.flag("--list") {
            for name in names {
                println!("{name}");
            }
        } else {
            return;
        }
        std::process::exit(0);
    }

    /// Takes all words that are no options.
    pub fn positionals(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.positional()).collect()
    }

    /// Takes the first word that is no option.
    pub fn positional(&mut self) -> Option<String> {
        let at = self.words.iter().position(|w| !w.starts_with("--"))?;
        Some(self.words.remove(at))
    }

    /// Ends the program when words are left.
    pub fn finish(self) {
        if let Some(word) = self.words.first() {
            usage::<()>(&format!("what is '{word}'? (--help lists the options)"));
        }
    }
}

/// Reads `64k`, `1m`, `4096`.
pub fn parse_size(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let (digits, shift) = match lower.as_bytes().last()? {
        b'k' => (&lower[..lower.len() - 1], 10),
        b'm' => (&lower[..lower.len() - 1], 20),
        b'g' => (&lower[..lower.len() - 1], 30),
        _ => (&lower[..], 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Ends the program with a message about its command line.
pub fn usage<T>(message: &str) -> T {
    eprintln!("{message}");
    std::process::exit(2)
}

/// The value of an environment variable, when it is set and reads as `T`.
pub fn env<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("64k"), Some(65536));
        assert_eq!(parse_size("2G"), Some(2 << 30));
        assert_eq!(parse_size("x"), None);
    }
}
