//! A timeline of one training step as SVG: compute and communication of every rank.

use std::fmt::Write;

use crate::ticks::ticks;
use crate::{Collective, Events, Span, SpanKind};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 130.0;
const ROW: f64 = 26.0;
const GAP: f64 = 14.0;
const TOP: f64 = 44.0;
const TRANSFER_COLOR: &str = "#d9822b";
const WAIT_COLOR: &str = "#b3202a";

/// Draws the step with the given number (its span is named `step N`), or the last one, as SVG.
/// `None` if no rank recorded that step.
pub fn draw_step(ranks: &[Events], step: Option<u64>) -> Option<String> {
    let name = match step {
        Some(step) => format!("step {step}"),
        None => last_step(ranks.first()?)?.name.clone(),
    };
    let steps: Vec<&Span> = ranks
        .iter()
        .filter_map(|rank| {
            rank.spans
                .iter()
                .find(|s| s.kind == SpanKind::Step && s.name == name)
        })
        .collect();
    let start = steps.iter().map(|s| s.started_ns).min()?;
    let end = steps.iter().map(|s| s.ended_ns).max()?;
    let scale = Scale {
        start,
        per_ns: (WIDTH - LEFT - 30.0) / (end - start).max(1) as f64,
    };

    let height = TOP + ranks.len() as f64 * (2.0 * ROW + GAP) + 40.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"10\" y=\"22\" font-size=\"15\" fill=\"#222\">{name} on {} ranks: {:.1} ms</text>\n",
        ranks.len(),
        (end - start) as f64 / 1e6
    );
    draw_legend(&mut svg);
    for (index, rank) in ranks.iter().enumerate() {
        let top = TOP + index as f64 * (2.0 * ROW + GAP);
        draw_rank(&mut svg, rank, top, &scale, end);
    }
    draw_axis(&mut svg, height - 30.0, &scale, end);
    svg.push_str("</svg>\n");
    Some(svg)
}

fn draw_legend(svg: &mut String) {
    let entries = [
        ("#3b7dd8", "forward"),
        ("#1f4f96", "backward"),
        ("#5a9a57", "optimizer"),
        (TRANSFER_COLOR, "transfer"),
        (WAIT_COLOR, "wait"),
    ];
    for (index, (fill, text)) in entries.iter().enumerate() {
        let x = WIDTH - 460.0 + 90.0 * index as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"13\" width=\"10\" height=\"10\" fill=\"{fill}\"/>\
             <text x=\"{}\" y=\"22\" fill=\"#444\">{text}</text>",
            x + 15.0
        );
    }
}

fn last_step(rank: &Events) -> Option<&Span> {
    rank.spans
        .iter()
        .filter(|s| s.kind == SpanKind::Step)
        .max_by_key(|s| s.started_ns)
}

/// Maps times to coordinates.
struct Scale {
    start: u64,
    per_ns: f64,
}

impl Scale {
    fn x(&self, ns: u64) -> f64 {
        LEFT + ns.saturating_sub(self.start) as f64 * self.per_ns
    }
}

fn draw_rank(svg: &mut String, rank: &Events, top: f64, scale: &Scale, end: u64) {
    let within = |from: u64, to: u64| to > scale.start && from < end;
    label(svg, top, &format!("rank {} compute", rank.rank));
    for span in rank.spans.iter().filter(|s| s.kind.is_compute()) {
        if within(span.started_ns, span.ended_ns) {
            let (from, to) = (span.started_ns, span.ended_ns);
            bar(
                svg,
                top,
                scale,
                (from, to.min(end)),
                color(span.kind),
                span.kind.name(),
            );
        }
    }
    label(svg, top + ROW, "communication");
    for collective in &rank.collectives {
        if collective.payload_bytes > 0 && within(collective.started_ns, collective.ended_ns) {
            draw_collective(svg, collective, top + ROW, scale);
        }
    }
}

fn draw_collective(svg: &mut String, collective: &Collective, top: f64, scale: &Scale) {
    let mib = collective.payload_bytes as f64 / f64::from(1 << 20);
    let text = format!("{} {mib:.1} MiB", collective.kind);
    let (from, to) = (collective.started_ns, collective.ended_ns);
    bar(svg, top, scale, (from, to), TRANSFER_COLOR, &text);
    // Mark the time during which the caller blocked in `wait`.
    if let Some((began, ended)) = collective.waited
        && ended > began
    {
        let (x, width) = (scale.x(began), (ended - began) as f64 * scale.per_ns);
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.2}\" y=\"{:.2}\" width=\"{width:.2}\" height=\"3\" fill=\"{WAIT_COLOR}\">\
             <title>waited {:.2} ms</title></rect>",
            top + ROW - 6.0,
            (ended - began) as f64 / 1e6
        );
    }
}

fn bar(svg: &mut String, top: f64, scale: &Scale, (from, to): (u64, u64), fill: &str, text: &str) {
    let x = scale.x(from);
    let width = (to.saturating_sub(from.max(scale.start)) as f64 * scale.per_ns).max(0.5);
    let ms = (to - from) as f64 / 1e6;
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.2}\" y=\"{top:.2}\" width=\"{width:.2}\" height=\"{}\" fill=\"{fill}\" \
         stroke=\"#fff\" stroke-width=\"0.5\"><title>{text}: {ms:.2} ms</title></rect>",
        ROW - 4.0
    );
    // A text that does not fit is only in the tooltip.
    if width > 7.0 * text.len() as f64 {
        let _ = writeln!(
            svg,
            "<text x=\"{:.2}\" y=\"{:.2}\" fill=\"#fff\">{text}</text>",
            x + 5.0,
            top + 15.0
        );
    }
}

fn label(svg: &mut String, top: f64, text: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"10\" y=\"{:.2}\" fill=\"#444\">{text}</text>",
        top + 15.0
    );
}

fn draw_axis(svg: &mut String, y: f64, scale: &Scale, end: u64) {
    for (ms, label) in ticks(0.0, (end - scale.start) as f64 / 1e6, 10) {
        let x = scale.x(scale.start + (ms * 1e6) as u64);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.2}\" y1=\"{TOP}\" x2=\"{x:.2}\" y2=\"{y:.2}\" stroke=\"#0001\"/>\
             <text x=\"{x:.2}\" y=\"{:.2}\" fill=\"#666\" text-anchor=\"middle\">{label} ms</text>",
            y + 16.0
        );
    }
}

fn color(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Forward => "#3b7dd8",
        SpanKind::Backward => "#1f4f96",
        _ => "#5a9a57",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ledger;

    #[test]
    fn a_step_is_drawn_with_its_compute() {
        let ledger = Ledger::recording(0);
        {
            let _step = ledger.enter(SpanKind::Step, "step 1");
            let _forward = ledger.enter(SpanKind::Forward, "forward");
        }
        let svg = draw_step(&[ledger.events()], None).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("step 1") && svg.contains("forward"));
        assert_eq!(draw_step(&[ledger.events()], Some(2)), None);
    }
}
