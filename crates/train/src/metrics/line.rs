//! The log line torchtitan's users know.

use super::StepMetrics;

const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const BLUE: &str = "\x1b[34m";
const MAGENTA: &str = "\x1b[35m";
const CYAN: &str = "\x1b[36m";
const BRIGHT_CYAN: &str = "\x1b[96m";
const RESET: &str = "\x1b[0m";

/// One line for a step, in colour if asked for.
pub fn line(metrics: &StepMetrics, color: bool) -> String {
    let fields = fields(metrics);
    match color {
        true => {
            fields
                .map(|(color, text)| format!("{color}{text}"))
                .join("  ")
                + RESET
        }
        false => fields.map(|(_, text)| text).join("  "),
    }
}

fn fields(m: &StepMetrics) -> [(&'static str, String); 7] {
    let mfu = m
        .mfu
        .map_or("N/A".into(), |mfu| format!("{:.2}%", 100.0 * mfu));
    let (gib, percent) = (m.memory_gib(), 100.0 * m.memory_share);
    [
        (RED, format!("step: {:2}", m.step)),
        (GREEN, format!("loss: {:8.5}", m.loss)),
        (YELLOW, format!("grad_norm: {:7.4}", m.grad_norm)),
        (BRIGHT_CYAN, format!("memory: {gib:5.2}GiB({percent:.2}%)")),
        (BLUE, format!("tps: {}", grouped(m.tps, 0))),
        (CYAN, format!("tflops: {}", grouped(m.tflops, 2))),
        (MAGENTA, format!("mfu: {mfu}")),
    ]
}

/// A number with a comma between groups of three digits.
fn grouped(value: f64, num_decimals: usize) -> String {
    let text = format!("{value:.num_decimals$}");
    let num_digits = text
        .trim_start_matches('-')
        .bytes()
        .take_while(u8::is_ascii_digit)
        .count();
    let start = text.find(|c: char| c.is_ascii_digit()).unwrap_or(0);
    let mut out = String::with_capacity(text.len() + num_digits / 3);
    for (index, c) in text.chars().enumerate() {
        let left = (start + num_digits).saturating_sub(index);
        if index > start && left > 0 && left.is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn metrics() -> StepMetrics {
        StepMetrics {
            step: 14,
            loss: 3.244_05,
            grad_norm: 0.8319,
            tps: 7282.4,
            tflops: 0.52,
            mfu: Some(0.0017),
            memory_bytes: (9.46 * (1u64 << 30) as f64) as u64,
            memory_share: 0.6499,
            ..StepMetrics::default()
        }
    }

    #[test]
    fn is_the_line_of_torchtitan() {
        assert_eq!(
            line(&metrics(), false),
            "step: 14  loss:  3.24405  grad_norm:  0.8319  memory:  9.46GiB(64.99%)  \
             tps: 7,282  tflops: 0.52  mfu: 0.17%"
        );
    }

    #[test]
    fn colour_changes_nothing_else() {
        let colored = line(&metrics(), true);
        assert!(colored.starts_with("\x1b[31mstep: 14") && colored.ends_with(RESET));
        let mut plain = String::new();
        let mut parts = colored.split('\x1b');
        plain += parts.next().unwrap();
        for part in parts {
            plain += part.split_once('m').unwrap().1;
        }
        assert_eq!(plain, line(&metrics(), false));
    }

    #[test]
    fn an_unknown_peak_is_said() {
        let unknown = StepMetrics {
            mfu: None,
            ..metrics()
        };
        assert!(line(&unknown, false).ends_with("mfu: N/A"));
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(grouped(0.0, 0), "0");
        assert_eq!(grouped(999.6, 0), "1,000");
        assert_eq!(grouped(-1234567.891, 2), "-1,234,567.89");
        assert_eq!(grouped(f64::NAN, 2), "NaN");
        assert_eq!(grouped(f64::INFINITY, 0), "inf");
    }

    proptest! {
        #[test]
        fn grouping_only_adds_commas(value in -1e15f64..1e15, decimals in 0usize..4) {
            let text = grouped(value, decimals);
            prop_assert_eq!(text.replace(',', ""), format!("{value:.decimals$}"));
            let whole = text.split('.').next().unwrap();
            prop_assert!(whole.split(',').skip(1).all(|group| group.len() == 3));
        }
    }
}
