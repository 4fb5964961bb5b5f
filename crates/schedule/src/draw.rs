//! SVG drawings of timelines: a row per rank, a box per task, white where a rank is idle.

use std::fmt::Write;

use crate::{Action, ComputeType, Span, Task, Timeline};

const ROW: f64 = 26.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 58.0;
const WIDTH: f64 = 1100.0;
/// Boxes narrower than this are drawn without a number.
const READABLE: f64 = 14.0;

/// Draws timelines below each other in one SVG file, each with its title and all to the same scale.
pub fn to_svg(panels: &[(&str, &Timeline)]) -> String {
    let heights = panels.iter().map(|(_, timeline)| panel_height(timeline));
    let height: f64 = heights.sum();
    let longest = panels.iter().map(|(_, timeline)| timeline.end());
    let scale = (WIDTH - LEFT - 16.0) / longest.fold(f64::MIN_POSITIVE, f64::max);
    let label = panels.first().map_or("", |(title, _)| title);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"system-ui, sans-serif\" role=\"img\" aria-label=\"{}\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n",
        escaped(label)
    );
    let mut top = 0.0;
    for (title, timeline) in panels {
        let _ = writeln!(svg, "<g transform=\"translate(0 {top})\">");
        draw_panel(&mut svg, title, timeline, scale);
        svg.push_str("</g>\n");
        top += panel_height(timeline);
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel_height(timeline: &Timeline) -> f64 {
    TOP + ROW * timeline.ranks.len() as f64 + 44.0
}

fn draw_panel(svg: &mut String, title: &str, timeline: &Timeline, scale: f64) {
    let _ = writeln!(
        svg,
        "<text x=\"16\" y=\"26\" font-size=\"16\" font-weight=\"bold\" fill=\"#1f2933\">{}</text>",
        escaped(title)
    );
    legend(svg);
    let num_ranks = timeline.ranks.len();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let y = TOP + ROW * rank as f64;
        let name = format!("rank {rank}");
        text(
            svg,
            16.0,
            y + ROW / 2.0 + 4.0,
            12,
            "start",
            "#1f2933",
            &name,
        );
        for span in spans {
            draw_span(svg, span, y, scale, num_ranks);
        }
    }
    let share = 100.0 * timeline.bubble() / timeline.end().max(f64::MIN_POSITIVE);
    let most = timeline.max_in_flight().into_iter().max().unwrap_or(0);
    let summary = format!(
        "step time {}; pipeline bubble {} ({share:.1} %); at most {most} micro-batches in flight on a rank, \
         counted per stage",
        short(timeline.end()),
        short(timeline.bubble())
    );
    let bottom = panel_height(timeline) - 14.0;
    text(svg, 16.0, bottom, 12, "start", "#1f2933", &summary);
}

fn draw_span(svg: &mut String, span: &Span, y: f64, scale: f64, num_ranks: usize) {
    let (x, width) = (LEFT + span.start * scale, (span.end - span.start) * scale);
    match span.action {
        Action::Single(task) => draw_task(svg, task, [x, y, width, ROW - 4.0], num_ranks),
        Action::Overlapped(first, second) => {
            let half = (ROW - 4.0) / 2.0;
            draw_task(svg, first, [x, y, width, half], num_ranks);
            draw_task(svg, second, [x, y + half, width, half], num_ranks);
        }
    }
}

fn draw_task(svg: &mut String, task: Task, [x, y, width, height]: [f64; 4], num_ranks: usize) {
    // Later stages of a rank are drawn paler.
    let opacity = match task.stage / num_ranks {
        0 => 1.0,
        chunk => (1.0 - 0.22 * chunk as f64).max(0.34),
    };
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{height:.2}\" fill=\"{}\" \
         fill-opacity=\"{opacity:.2}\" stroke=\"#fff\" stroke-width=\"0.8\"><title>{task}</title></rect>",
        width.max(0.2),
        color(task.compute_type)
    );
    if width >= READABLE && height > 14.0 {
        let number = task.microbatch.to_string();
        let middle = (x + width / 2.0, y + height / 2.0 + 4.0);
        text(svg, middle.0, middle.1, 11, "middle", "#fff", &number);
    }
}

fn legend(svg: &mut String) {
    let entries = [
        (ComputeType::Forward, "forward"),
        (ComputeType::Backward, "backward"),
        (ComputeType::BackwardInput, "backward input"),
        (ComputeType::BackwardWeight, "backward weight"),
    ];
    for (index, (compute_type, name)) in entries.into_iter().enumerate() {
        let x = 16.0 + 150.0 * index as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"36\" width=\"12\" height=\"12\" fill=\"{}\"/>",
            color(compute_type)
        );
        text(svg, x + 18.0, 46.0, 12, "start", "#1f2933", name);
    }
    text(
        svg,
        640.0,
        46.0,
        12,
        "start",
        "#1f2933",
        "paler: later stages of the rank",
    );
}

fn text(svg: &mut String, x: f64, y: f64, size: u8, anchor: &str, fill: &str, content: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" text-anchor=\"{anchor}\" \
         fill=\"{fill}\">{}</text>",
        escaped(content)
    );
}

fn color(compute_type: ComputeType) -> &'static str {
    match compute_type {
        ComputeType::Forward => "#3b6fb6",
        ComputeType::Backward => "#3d8f63",
        ComputeType::BackwardInput => "#58a97b",
        ComputeType::BackwardWeight => "#d08736",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Formats a number without trailing zeros.
fn short(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
