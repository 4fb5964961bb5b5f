//! The plans, and every figure with how it is known.

use std::fmt::Write;

use super::{GIB, escaped, seconds, section};
use crate::report::Report;
use crate::{Constants, Figure};

pub(super) fn plans(page: &mut String, report: &Report, most: usize) {
    page.push_str(
        "<div class=\"panel scroll\"><table><thead><tr><th></th><th>mesh</th><th>schedule</th>\
         <th class=\"n\">batch</th><th>recompute</th><th class=\"n\">ZeRO</th><th class=\"n\">peak GiB</th>\
         <th class=\"n\">step</th><th class=\"n\">range</th><th class=\"n\">MFU</th><th class=\"n\">tok/s/GPU</th>\
         </tr></thead><tbody>\n",
    );
    for (place, plan) in report.found.plans.iter().take(most).enumerate() {
        let (strategy, time) = (&plan.strategy, &plan.time);
        let schedule = match strategy.degrees.pp {
            1 => "none".to_owned(),
            _ => strategy.layers.to_string(),
        };
        let class = if place == 0 { " class=\"best\"" } else { "" };
        let _ = writeln!(
            page,
            "<tr{class}><td>{}</td><td>{}</td><td>{schedule}</td><td class=\"n\">{} × {}</td><td>{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{:.1}</td><td class=\"n\">{}</td><td class=\"n\">{} to {}</td>\
             <td class=\"n\">{:.1} %</td><td class=\"n\">{:.0}</td></tr>",
            place + 1,
            strategy.degrees,
            strategy.micro_batch,
            strategy.num_microbatches(),
            strategy.recompute,
            strategy.zero_stage,
            plan.memory.total() / GIB,
            seconds(time.likely),
            seconds(time.low),
            seconds(time.high),
            100.0 * report.utilization(plan),
            report.tokens_per_second(plan)
        );
    }
    page.push_str("</tbody></table></div>\n");
}

/// Every input with its basis and source.
pub(super) fn figures(page: &mut String, report: &Report) {
    let question = &report.question;
    let accelerator = &question.cluster.accelerator;
    let what = "A plan is as good as the numbers it is made of. Replace them with your own in a cluster file.";
    section(page, "Every figure, and where it is from", what);
    page.push_str("<div class=\"panel scroll\"><table><thead><tr><th>figure</th><th class=\"n\">value</th><th>basis</th>");
    page.push_str("<th>source</th></tr></thead><tbody>\n");
    let rows: [(&str, &Figure, f64, &str); 10] = [
        ("peak, 16 bits", &accelerator.peak, 1e12, "Tflop/s"),
        (
            "matrix products at most",
            &accelerator.sustained,
            1e12,
            "Tflop/s",
        ),
        ("memory", &accelerator.memory, GIB, "GiB"),
        ("to memory", &accelerator.memory_bandwidth, 1e9, "GB/s"),
        (
            "to all peers in the machine",
            &accelerator.link,
            1e9,
            "GB/s",
        ),
        ("to one peer", &accelerator.link_per_peer, 1e9, "GB/s"),
        (
            "to other machines, each GPU",
            &accelerator.network,
            1e9,
            "GB/s",
        ),
        ("to main memory", &accelerator.host, 1e9, "GB/s"),
        (
            "driver and libraries",
            &question.overheads.context,
            GIB,
            "GiB",
        ),
        (
            "lost between tensors",
            &question.overheads.fragmentation,
            0.01,
            "%",
        ),
    ];
    for (name, figure, unit, suffix) in rows {
        let _ = writeln!(
            page,
            "<tr><td>{name}</td><td class=\"n\">{} {suffix}</td><td><span class=\"basis {basis}\">{basis}</span></td>\
             <td class=\"loose\">{}</td></tr>",
            short(figure.value / unit),
            escaped(&figure.source),
            basis = figure.basis
        );
    }
    page.push_str("</tbody></table>\n");
    let calibration = &question.calibration;
    let _ = writeln!(
        page,
        "<details><summary>Constants, fitted to {}; {:.0} % off on average on runs not used</summary><table><tbody>",
        escaped(&calibration.source),
        100.0 * calibration.spread
    );
    let values = calibration.constants.to_array();
    for (name, value) in Constants::names().iter().zip(values) {
        let _ = writeln!(
            page,
            "<tr><td>{name}</td><td class=\"n\">{}</td></tr>",
            short(value)
        );
    }
    page.push_str("</tbody></table></details></div>\n");
}

/// A number with four digits.
fn short(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e7).contains(&value) {
        return format!("{value:.3e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
