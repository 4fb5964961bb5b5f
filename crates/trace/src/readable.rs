//! Human-readable formatting of bytes and durations.

/// A binary unit of bytes, to format several amounts with the same unit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ByteUnit {
    name: &'static str,
    bytes: u64,
}

impl ByteUnit {
    const ALL: [ByteUnit; 5] = [
        ByteUnit::new("B", 0),
        ByteUnit::new("KiB", 1),
        ByteUnit::new("MiB", 2),
        ByteUnit::new("GiB", 3),
        ByteUnit::new("TiB", 4),
    ];

    const fn new(name: &'static str, power: u32) -> ByteUnit {
        ByteUnit {
            name,
            bytes: 1 << (10 * power),
        }
    }

    /// The largest unit that is not larger than `amount`.
    pub fn fitting(amount: u64) -> ByteUnit {
        let fits = |unit: &&ByteUnit| amount >= unit.bytes;
        let found = ByteUnit::ALL.iter().rev().find(fits);
        *found.unwrap_or(&ByteUnit::ALL[0])
    }

    /// The symbol, such as `MiB`.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// The number of bytes in one unit.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// Converts an amount of bytes to this unit.
    pub fn of(self, amount: u64) -> f64 {
        amount as f64 / self.bytes as f64
    }
}

/// Formats bytes with a suitable unit: `512 B`, `1.50 GiB`.
pub fn readable_bytes(amount: u64) -> String {
    let unit = ByteUnit::fitting(amount);
    match unit.bytes {
        1 => format!("{amount} B"),
        _ => format!("{:.2} {}", unit.of(amount), unit.name),
    }
}

/// A number with its noun: `1 file`, `2 files`, `2 batches`.
pub fn counted(number: u64, noun: &str) -> String {
    let ending = match number {
        1 => "",
        _ if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {noun}{ending}")
}

/// Formats nanoseconds with a suitable unit: `0`, `12.500 us`, `1.268 s`.
pub fn readable_time(ns: u64) -> String {
    let ns = ns as f64;
    match ns {
        0.0 => "0".to_owned(),
        _ if ns >= 1e9 => format!("{:.3} s", ns / 1e9),
        _ if ns >= 1e6 => format!("{:.3} ms", ns / 1e6),
        _ => format!("{:.3} us", ns / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_a_suitable_unit() {
        let texts = [0, 512, 1023, 1024, 3 << 29, 5000 << 40].map(readable_bytes);
        let expected = [
            "0 B",
            "512 B",
            "1023 B",
            "1.00 KiB",
            "1.50 GiB",
            "5000.00 TiB",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn times_have_a_suitable_unit() {
        let texts = [0, 12_500, 2_000_000, 1_267_870_000].map(readable_time);
        assert_eq!(texts, ["0", "12.500 us", "2.000 ms", "1.268 s"]);
    }
}
