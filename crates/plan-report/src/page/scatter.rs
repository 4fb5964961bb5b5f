//! A scatter plot of step time and peak memory, one dot per plan.

use std::fmt::Write;

use super::{GIB, escaped, legend, seconds};
use crate::{Report, describe};
use trainyard_plan::Plan;
use trainyard_trace::ticks;

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 52.0;
const BOTTOM: f64 = 40.0;
/// Plans slower than this multiple of the best step time are left out, to keep the scale readable.
const MAX_SLOWDOWN: f64 = 2.5;

struct Axes {
    from: f64,
    to: f64,
    capacity: f64,
}

impl Axes {
    fn x(&self, seconds: f64) -> f64 {
        LEFT + 10.0 + (seconds - self.from) / (self.to - self.from) * (WIDTH - LEFT - 40.0)
    }

    fn y(&self, bytes: f64) -> f64 {
        let height = HEIGHT - BOTTOM - 14.0;
        14.0 + height * (1.0 - bytes / self.capacity)
    }
}

pub(super) fn draw(page: &mut String, report: &Report) {
    let Some(best) = report.best() else { return };
    let near = |plan: &&Plan| plan.time.likely <= MAX_SLOWDOWN * best.time.likely;
    let plans: Vec<&Plan> = report.result.plans.iter().filter(near).collect();
    let front: Vec<&Plan> = report.result.pareto_front.iter().filter(near).collect();
    let all = || plans.iter().chain(&front).map(|plan| plan.time.likely);
    let (from, to) = all().fold((best.time.likely, best.time.likely), |(a, b), s| {
        (a.min(s), b.max(s))
    });
    let axes = Axes {
        from,
        to: to.max(from * 1.02),
        capacity: report.request.cluster.accelerator.memory.value,
    };
    let _ = writeln!(
        page,
        "<div class=\"panel\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"step time and memory\">"
    );
    grid(page, &axes);
    let line: Vec<String> = front
        .iter()
        .map(|plan| {
            format!(
                "{:.1},{:.1}",
                axes.x(plan.time.likely),
                axes.y(plan.memory.total())
            )
        })
        .collect();
    let _ = writeln!(
        page,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"var(--c4)\" stroke-opacity=\".5\" stroke-width=\"1.5\"/>",
        line.join(" ")
    );
    plans
        .iter()
        .for_each(|plan| dot(page, &axes, plan, 4.0, "c6"));
    front
        .iter()
        .for_each(|plan| dot(page, &axes, plan, 5.0, "c4"));
    if let Some(compared) = report.compared.as_ref().filter(|c| c.shortfall <= 0.0) {
        dot(page, &axes, &compared.diff.plan, 7.0, "c5");
    }
    dot(page, &axes, best, 8.0, "c1");
    page.push_str("</svg>\n");
    let mut entries = vec![
        ("c1", "best plan"),
        ("c4", "Pareto front"),
        ("c6", "other meshes"),
    ];
    if report.compared.is_some() {
        entries.push(("c5", "compared plan"));
    }
    legend(page, &entries);
    page.push_str("</div>\n");
}

fn grid(page: &mut String, axes: &Axes) {
    for (gib, label) in ticks(0.0, axes.capacity / GIB, 5) {
        let y = axes.y(gib * GIB);
        let _ = writeln!(
            page,
            "<line x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"var(--line)\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            LEFT - 8.0,
            y + 4.0
        );
    }
    let (unit, scale) = if axes.to >= 1.0 {
        ("s", 1.0)
    } else {
        ("ms", 1e3)
    };
    for (time, label) in ticks(axes.from * scale, axes.to * scale, 5) {
        let x = axes.x(time / scale);
        let _ = writeln!(
            page,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label} {unit}</text>",
            HEIGHT - BOTTOM + 18.0
        );
    }
    let _ = writeln!(
        page,
        "<text x=\"{WIDTH}\" y=\"{:.1}\" text-anchor=\"end\">x: step time; y: peak memory in GiB</text>",
        HEIGHT - 4.0
    );
}

fn dot(page: &mut String, axes: &Axes, plan: &Plan, radius: f64, color: &str) {
    let _ = writeln!(
        page,
        "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\" fill=\"var(--{color})\" fill-opacity=\".85\"><title>{}: {}, \
         {:.1} GiB</title></circle>",
        axes.x(plan.time.likely),
        axes.y(plan.memory.total()),
        escaped(&describe(plan)),
        seconds(plan.time.likely),
        plan.memory.total() / GIB
    );
}
