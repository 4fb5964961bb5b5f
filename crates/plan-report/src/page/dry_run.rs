//! Two bars per class of ranks: memory by formula and by dry run.

use std::fmt::Write;

use super::{GIB, escaped, legend};
use crate::{DryRun, Report};

pub(super) fn draw(page: &mut String, report: &Report) {
    let capacity = report.request.cluster.accelerator.memory.value;
    let runs = report.dry_runs.iter().flatten();
    let bytes = runs.flat_map(|run| &run.ranks);
    let bytes = bytes.map(|rank| rank.peak.dry_run.max(rank.peak.formula));
    let widest = bytes.fold(capacity, f64::max);
    page.push_str("<div class=\"panel\">\n");
    for (index, run) in report.dry_runs.iter().enumerate() {
        let mesh = report.result.plans.get(index);
        let mesh = mesh.map_or(String::new(), |plan| plan.strategy.degrees.to_string());
        let _ = writeln!(page, "<p><b>{}. {mesh}</b></p>", index + 1);
        match run {
            Ok(run) => bars(page, run, widest),
            Err(why) => {
                let _ = writeln!(page, "<p class=\"note\">No dry run: {}</p>", escaped(why));
            }
        }
    }
    let entries = [
        ("c1", "parameters and optimizer states"),
        ("c4", "rest of the peak"),
        ("track", "free"),
    ];
    legend(page, &entries);
    page.push_str("</div>\n");
}

fn bars(page: &mut String, run: &DryRun, widest: f64) {
    for rank in &run.ranks {
        let formula = (rank.states.formula, rank.peak.formula);
        bar(page, rank.class.name(), formula, widest);
        bar(
            page,
            "by dry run",
            (rank.states.dry_run, rank.peak.dry_run),
            widest,
        );
    }
    for deviation in &run.deviations {
        let _ = writeln!(
            page,
            "<p class=\"note\">Deviation from the plan: {}</p>",
            escaped(deviation)
        );
    }
}

fn bar(page: &mut String, name: &str, (states, peak): (f64, f64), widest: f64) {
    let parts = [("c1", states.min(peak)), ("c4", (peak - states).max(0.0))];
    let _ = write!(
        page,
        "<div class=\"row\"><span>{name}</span><div class=\"bar\">"
    );
    for (color, bytes) in parts {
        let _ = write!(
            page,
            "<i style=\"width:{:.2}%;background:var(--{color})\" title=\"{:.2} GiB\"></i>",
            100.0 * bytes / widest,
            bytes / GIB
        );
    }
    let _ = writeln!(
        page,
        "</div><span class=\"value\">{:.1} GiB</span></div>",
        peak / GIB
    );
}
