//! The memory report as one self-contained HTML page.
//!
//! The chart is a static SVG; the script only shows the values under the pointer.

use std::fmt::Write;

use crate::memory_chart::MemoryChart;
use crate::readable::{readable_bytes, readable_time};
use crate::{MemoryHistory, MemoryKind, Span};

const STYLE: &str = include_str!("memory_page/style.css");
const SCRIPT: &str = include_str!("memory_page/hover.js");

/// Renders an HTML page with the history as a stacked area chart. The forward, backward and optimizer spans
/// among `spans` are marked above it.
pub fn draw_memory(title: &str, history: &MemoryHistory, spans: &[Span]) -> String {
    let title = escape(title);
    let chart = MemoryChart::new(history, spans);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>{title}</h1>\n<p>{}</p>\n\
         <div class=\"chart\">\n{}<div class=\"readout\" hidden></div>\n</div>\n{}</main>\n\
         <script>\nconst chart = {};\n{SCRIPT}</script>\n</body>\n</html>\n",
        summary(history),
        chart.svg(),
        table(history),
        chart.data(),
    )
}

/// The summary above the chart.
fn summary(history: &MemoryHistory) -> String {
    let peak = history.peak();
    format!(
        "Peak <b>{}</b>, {} after the start; {} allocated at the end. {} allocations and releases in {}.",
        readable_bytes(peak.total()),
        readable_time(peak.at_ns - history.first().at_ns),
        readable_bytes(history.last().total()),
        history.num_changes(),
        readable_time(history.ended_ns() - history.first().at_ns),
    )
}

/// The table below the chart: bytes by kind.
fn table(history: &MemoryHistory) -> String {
    let (peak, last, peaks) = (history.peak(), history.last(), history.peak_of_each());
    let mut table = String::from(
        "<table>\n<tr><th></th><th>at the peak</th><th></th><th>at the end</th>\
         <th>peak of the kind</th></tr>\n",
    );
    for kind in MemoryKind::ALL {
        let index = kind.index();
        let share = 100.0 * peak.bytes[index] as f64 / peak.total().max(1) as f64;
        let _ = writeln!(
            table,
            "<tr><th><i class=\"{kind}\"></i>{}</th><td>{}</td><td>{share:.1} %</td><td>{}</td>\
             <td>{}</td></tr>",
            kind.plural(),
            readable_bytes(peak.bytes[index]),
            readable_bytes(last.bytes[index]),
            readable_bytes(peaks[index])
        );
    }
    let _ = writeln!(
        table,
        "<tr class=\"total\"><th>total</th><td>{}</td><td></td><td>{}</td><td></td></tr>\n</table>",
        readable_bytes(peak.total()),
        readable_bytes(last.total())
    );
    table
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{Allocation, SpanKind};

    const MIB: u64 = 1 << 20;

    fn change(kind: MemoryKind, mib: i64, at_ns: u64) -> Allocation {
        let bytes = mib * MIB as i64;
        Allocation { kind, bytes, at_ns }
    }

    fn span(kind: SpanKind, started_ns: u64, ended_ns: u64) -> Span {
        let name = kind.name().to_owned();
        Span {
            name,
            kind,
            started_ns,
            ended_ns,
            thread: 0,
        }
    }

    fn page() -> String {
        let changes = [
            change(MemoryKind::Activation, 30, 2_000_000),
            change(MemoryKind::Activation, -30, 6_000_000),
        ];
        let base = [4 * MIB, 4 * MIB, 8 * MIB, 0, 0, 0];
        let history = MemoryHistory::new(base, (0, 10_000_000), &changes);
        let spans = [
            span(SpanKind::Step, 0, 10_000_000),
            span(SpanKind::Forward, 0, 4_000_000),
            span(SpanKind::Backward, 4_000_000, 8_000_000),
            span(SpanKind::Forward, 11_000_000, 12_000_000),
        ];
        draw_memory("rank 0 & <step 2>", &history, &spans)
    }

    #[test]
    fn a_page_shows_kinds_peak_and_phases() {
        let page = page();
        assert!(page.contains("<title>rank 0 &amp; &lt;step 2&gt;</title>"));
        assert!(
            page.contains("Peak <b>46.00 MiB</b>, 2.000 ms after the start; 16.00 MiB allocated")
        );
        assert!(page.contains(">peak 46.00 MiB</text>"));
        assert!(page.contains(">10 MiB</text>") && page.contains(">5 ms</text>"));
        for kind in ["parameter", "gradient", "optimizer", "activation"] {
            assert!(page.contains(&format!("<path class=\"{kind}\"")), "{kind}");
        }
        // A kind without allocations is not drawn.
        assert!(!page.contains("<path class=\"communication\""));
        assert_eq!(page.matches("class=\"phase forward\"").count(), 1);
        assert_eq!(page.matches("class=\"phase backward\"").count(), 1);
        assert!(!page.contains("class=\"phase step\""));
    }

    #[test]
    fn a_page_is_self_contained() {
        let page = page().replace("http://www.w3.org/2000/svg", "");
        for outside in ["http:", "https:", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn the_script_gets_the_levels() {
        let page = page();
        let line = page.lines().find_map(|l| l.strip_prefix("const chart = "));
        let text = line.and_then(|line| line.strip_suffix(';')).unwrap();
        let data: Value = serde_json::from_str(text).unwrap();
        assert_eq!(data["at"], json!([0, 2_000_000, 6_000_000]));
        assert_eq!(data["bytes"][1][3], 30 * MIB);
        assert_eq!(data["phases"][1], json!(["backward", 4_000_000, 8_000_000]));
    }

    #[test]
    fn an_empty_step_is_drawn() {
        let page = draw_memory("empty", &MemoryHistory::new([0; 6], (5, 5), &[]), &[]);
        assert!(page.contains(">peak 0 B</text>") && !page.contains("NaN"));
    }
}
