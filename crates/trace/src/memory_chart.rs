//! A stacked area chart of the allocated memory by kind over one step.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::readable::{ByteUnit, readable_bytes, readable_time};
use crate::ticks::ticks;
use crate::{MemoryHistory, MemoryKind, MemoryLevel, Span, SpanKind};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 940.0;
const PHASES: f64 = 36.0;
const PHASE_HEIGHT: f64 = 18.0;
const TOP: f64 = 62.0;
const BOTTOM: f64 = 408.0;

/// The most levels to draw: more could not be distinguished, and would make the file large.
const MAX_LEVELS: usize = 2000;

/// The data and the scale of a chart.
pub(crate) struct MemoryChart<'a> {
    history: &'a MemoryHistory,
    levels: Vec<MemoryLevel>,
    phases: Vec<Phase>,
    scale: Scale,
}

impl MemoryChart<'_> {
    pub(crate) fn new<'a>(history: &'a MemoryHistory, spans: &[Span]) -> MemoryChart<'a> {
        let scale = Scale::of(history);
        MemoryChart {
            levels: history.downsampled(MAX_LEVELS),
            phases: phases(spans, &scale),
            history,
            scale,
        }
    }

    /// The chart as SVG. A style sheet sets the colors of the classes, which are kinds and phases.
    pub(crate) fn svg(&self) -> String {
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             role=\"img\" aria-label=\"Allocated bytes by kind over the step\">\n"
        );
        draw_legend(&mut svg, self.history);
        draw_bytes_axis(&mut svg, &self.scale);
        // Each area extends down to the axis; the next one is painted over it.
        for kind in kinds(self.history).rev() {
            draw_area(&mut svg, kind, &self.levels, &self.scale);
        }
        draw_time_axis(&mut svg, &self.scale);
        draw_phases(&mut svg, &self.phases, &self.scale);
        draw_peak(&mut svg, self.history.peak(), &self.scale);
        let _ = writeln!(
            svg,
            "<line class=\"here\" y1=\"{TOP}\" y2=\"{BOTTOM}\" visibility=\"hidden\"/>\n</svg>"
        );
        svg
    }

    /// The data for the hover script. Times are relative to the start, because JavaScript numbers cannot
    /// represent nanoseconds since 1970.
    pub(crate) fn data(&self) -> Value {
        let since = |ns: u64| ns - self.scale.start;
        let at = self.levels.iter().map(|level| since(level.at_ns));
        let bytes = self.levels.iter().map(|level| level.bytes);
        let phases = self.phases.iter();
        let phases = phases.map(|phase| json!([phase.kind, since(phase.from), since(phase.to)]));
        json!({
            "left": LEFT,
            "right": RIGHT,
            "length": self.scale.end - self.scale.start,
            "kinds": MemoryKind::ALL.map(|kind| (kind.name(), kind.plural())),
            "phases": phases.collect::<Vec<_>>(),
            "at": at.collect::<Vec<_>>(),
            "bytes": bytes.collect::<Vec<_>>(),
        })
    }
}

/// Maps times and bytes to coordinates.
struct Scale {
    start: u64,
    end: u64,
    top_bytes: f64,
}

impl Scale {
    fn of(history: &MemoryHistory) -> Scale {
        Scale {
            start: history.first().at_ns,
            end: history.ended_ns().max(history.first().at_ns + 1),
            // Leave room for the label of the peak.
            top_bytes: history.peak().total().max(1) as f64 * 1.1,
        }
    }

    fn length(&self) -> f64 {
        (self.end - self.start) as f64
    }

    fn x(&self, ns: u64) -> f64 {
        let since = ns.clamp(self.start, self.end) - self.start;
        LEFT + since as f64 / self.length() * (RIGHT - LEFT)
    }

    fn y(&self, bytes: f64) -> f64 {
        BOTTOM - bytes / self.top_bytes * (BOTTOM - TOP)
    }
}

/// A span of compute within the chart.
struct Phase {
    kind: SpanKind,
    from: u64,
    to: u64,
}

impl Phase {
    /// The longest name that fits, if any.
    fn label(&self, width: f64) -> Option<&'static str> {
        let short = match self.kind {
            SpanKind::Forward => "fwd",
            SpanKind::Backward => "bwd",
            _ => "opt",
        };
        let fits = |name: &&str| width > 8.0 * name.len() as f64;
        [self.kind.name(), short].into_iter().find(fits)
    }
}

fn phases(spans: &[Span], scale: &Scale) -> Vec<Phase> {
    let within = |span: &&Span| {
        span.kind.is_compute() && span.ended_ns > scale.start && span.started_ns < scale.end
    };
    let phase = |span: &Span| Phase {
        kind: span.kind,
        from: span.started_ns.max(scale.start),
        to: span.ended_ns.min(scale.end),
    };
    spans.iter().filter(within).map(phase).collect()
}

/// The kinds with any allocated memory.
fn kinds(history: &MemoryHistory) -> impl DoubleEndedIterator<Item = MemoryKind> {
    let highest = history.peak_of_each();
    MemoryKind::ALL
        .into_iter()
        .filter(move |kind| highest[kind.index()] > 0)
}

fn draw_legend(svg: &mut String, history: &MemoryHistory) {
    let mut x = LEFT;
    for kind in kinds(history) {
        let _ = writeln!(
            svg,
            "<rect class=\"{kind}\" x=\"{x}\" y=\"8\" width=\"11\" height=\"11\" rx=\"2\"/>\
             <text x=\"{}\" y=\"18\">{}</text>",
            x + 16.0,
            kind.plural()
        );
        // A character is about this wide.
        x += 36.0 + 7.0 * kind.plural().len() as f64;
    }
}

/// Draws the total of all kinds up to this one.
fn draw_area(svg: &mut String, kind: MemoryKind, levels: &[MemoryLevel], scale: &Scale) {
    let _ = write!(svg, "<path class=\"{kind}\" d=\"M{LEFT} {BOTTOM}");
    let mut last = String::new();
    for level in levels {
        let bytes: u64 = level.bytes[..=kind.index()].iter().sum();
        let y = format!("{:.1}", scale.y(bytes as f64));
        // Most changes concern other kinds and leave this area as it is.
        if y != last {
            let _ = write!(svg, "H{:.1}V{y}", scale.x(level.at_ns));
            last = y;
        }
    }
    let _ = writeln!(svg, "H{RIGHT}V{BOTTOM}Z\"/>");
}

fn draw_bytes_axis(svg: &mut String, scale: &Scale) {
    let unit = ByteUnit::fitting(scale.top_bytes as u64);
    for (value, text) in ticks(0.0, scale.top_bytes / unit.bytes() as f64, 6) {
        let y = scale.y(value * unit.bytes() as f64);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{RIGHT}\" y2=\"{y:.1}\"/>\
             <text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text} {}</text>",
            LEFT - 8.0,
            y + 4.0,
            unit.name()
        );
    }
}

fn draw_time_axis(svg: &mut String, scale: &Scale) {
    let length = scale.length();
    let (unit, ns) = match length {
        _ if length >= 1e9 => ("s", 1e9),
        _ if length >= 1e6 => ("ms", 1e6),
        _ => ("us", 1e3),
    };
    for (value, text) in ticks(0.0, length / ns, 10) {
        let x = scale.x(scale.start + (value * ns) as u64);
        let _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{BOTTOM}\" x2=\"{x:.1}\" y2=\"{}\"/>\
             <text class=\"tick\" x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{text} {unit}</text>",
            BOTTOM + 5.0,
            BOTTOM + 20.0
        );
    }
    let _ = writeln!(
        svg,
        "<line class=\"axis\" x1=\"{LEFT}\" y1=\"{BOTTOM}\" x2=\"{RIGHT}\" y2=\"{BOTTOM}\"/>"
    );
}

fn draw_phases(svg: &mut String, phases: &[Phase], scale: &Scale) {
    for phase in phases {
        let (x, end) = (scale.x(phase.from), scale.x(phase.to));
        let width = (end - x).max(0.5);
        let _ = writeln!(
            svg,
            "<rect class=\"phase {0}\" x=\"{x:.1}\" y=\"{PHASES}\" width=\"{width:.1}\" \
             height=\"{PHASE_HEIGHT}\"><title>{0}: {1}</title></rect>",
            phase.kind,
            readable_time(phase.to - phase.from)
        );
        // A phase without room for a label gets only a tooltip; borders this dense would hide the chart.
        if let Some(label) = phase.label(width) {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>\
                 <path class=\"border\" d=\"M{x:.1} {TOP}V{BOTTOM}M{end:.1} {TOP}V{BOTTOM}\"/>",
                (x + end) / 2.0,
                PHASES + 13.0
            );
        }
    }
}

fn draw_peak(svg: &mut String, peak: &MemoryLevel, scale: &Scale) {
    let (x, y) = (scale.x(peak.at_ns), scale.y(peak.total() as f64));
    // Keep the label within the chart.
    let (anchor, label_x) = match x {
        _ if x < LEFT + 70.0 => ("start", x - 4.0),
        _ if x > RIGHT - 70.0 => ("end", x + 4.0),
        _ => ("middle", x),
    };
    let _ = writeln!(
        svg,
        "<circle class=\"peak\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>\
         <text class=\"peak\" x=\"{label_x:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">peak {}</text>",
        y - 10.0,
        readable_bytes(peak.total())
    );
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn coordinates_are_within_the_chart(
            at in 0u64..2000,
            bytes in 0u64..1 << 40,
            highest in 0u64..1 << 40,
        ) {
            let history = MemoryHistory::new([highest, 0, 0, 0, 0, 0], (100, 1000), &[]);
            let scale = Scale::of(&history);
            let (x, y) = (scale.x(at), scale.y(bytes.min(highest) as f64));
            prop_assert!((LEFT..=RIGHT).contains(&x));
            prop_assert!((TOP..=BOTTOM).contains(&y));
        }
    }
}
