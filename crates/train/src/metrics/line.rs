//! The log line of a step, in the format of torchtitan.

use super::StepMetrics;
use crate::TransferStats;

const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const BLUE: &str = "\x1b[34m";
const MAGENTA: &str = "\x1b[35m";
const CYAN: &str = "\x1b[36m";
const BRIGHT_CYAN: &str = "\x1b[96m";
const RESET: &str = "\x1b[0m";

/// The log line of a step, with ANSI colors if `color` is set.
pub fn line(metrics: &StepMetrics, color: bool) -> String {
    let mut fields = fields(metrics).to_vec();
    fields.extend(expert_fields(metrics).map(|text| (RED, text)));
    let text = |(color_code, text): (&'static str, String)| {
        if color {
            format!("{color_code}{text}")
        } else {
            text
        }
    };
    let texts: Vec<String> = fields.into_iter().map(text).collect();
    let end = if color { RESET } else { "" };
    texts.join("  ") + end
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

/// Additional fields of mixture-of-experts models.
fn expert_fields(m: &StepMetrics) -> impl Iterator<Item = String> {
    let busiest = m.imbalance().map(|x| format!("busiest expert: {x:.2}x"));
    let dropped = m.dropped_share().filter(|&share| share > 0.0);
    let dropped = dropped.map(|share| format!("dropped: {:.2}%", 100.0 * share));
    let transfer = |name: &str, stats: TransferStats| {
        let (ms, speed) = (1e3 * stats.seconds, stats.bandwidth / 1e9);
        format!("{name}: {ms:.1}ms({speed:.2}GB/s)")
    };
    let transfers = m.expert_traffic.map(|traffic| {
        let dispatch = transfer("dispatch", traffic.dispatch);
        format!("{dispatch}  {}", transfer("combine", traffic.combine))
    });
    busiest.into_iter().chain(dropped).chain(transfers)
}

/// Formats a number with a comma between groups of three digits.
pub(super) fn grouped(value: f64, num_decimals: usize) -> String {
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
    use crate::{ExpertLoad, ExpertTraffic};

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
    fn matches_the_line_of_torchtitan() {
        assert_eq!(
            line(&metrics(), false),
            "step: 14  loss:  3.24405  grad_norm:  0.8319  memory:  9.46GiB(64.99%)  \
             tps: 7,282  tflops: 0.52  mfu: 0.17%"
        );
    }

    #[test]
    fn color_changes_nothing_else() {
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
    fn an_unknown_mfu_is_not_available() {
        let unknown = StepMetrics {
            mfu: None,
            ..metrics()
        };
        assert!(line(&unknown, false).ends_with("mfu: N/A"));
    }

    #[test]
    fn expert_fields_are_added_for_moe_models() {
        let stats = |seconds| TransferStats {
            seconds,
            bytes: 1e6,
            bandwidth: 1.25e9,
        };
        let mut metrics = StepMetrics {
            expert_loads: vec![ExpertLoad {
                layer: 1,
                rows: vec![3, 1],
                dropped: 1,
            }],
            expert_traffic: Some(ExpertTraffic {
                dispatch: stats(0.0031),
                combine: stats(0.002),
            }),
            ..metrics()
        };
        assert!(line(&metrics, false).ends_with(
            "busiest expert: 1.50x  dropped: 25.00%  dispatch: 3.1ms(1.25GB/s)  combine: 2.0ms(1.25GB/s)"
        ));
        metrics.expert_loads[0].dropped = 0;
        metrics.expert_traffic = None;
        assert!(line(&metrics, false).ends_with("busiest expert: 1.50x"));
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
