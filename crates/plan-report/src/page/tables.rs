//! Tables of the best plans and of every input with its source.

use std::fmt::Write;

use super::{GIB, escaped, seconds, section};
use crate::Report;
use trainyard_plan::{Constants, SourcedValue};

pub(super) fn plans(page: &mut String, report: &Report, most: usize) {
    page.push_str(
        "<div class=\"panel scroll\"><table><thead><tr><th></th><th>mesh</th><th>schedule</th>\
         <th class=\"n\">micro-batches</th><th>recompute</th><th class=\"n\">ZeRO</th><th class=\"n\">peak GiB</th>\
         <th class=\"n\">step</th><th class=\"n\">range</th><th class=\"n\">MFU</th><th class=\"n\">tok/s/GPU</th>\
         </tr></thead><tbody>\n",
    );
    for (index, plan) in report.result.plans.iter().take(most).enumerate() {
        let (strategy, time) = (&plan.strategy, &plan.time);
        let schedule = match strategy.degrees.pp {
            1 => "none".to_owned(),
            _ => strategy.pipeline.to_string(),
        };
        let class = if index == 0 { " class=\"best\"" } else { "" };
        let _ = writeln!(
            page,
            "<tr{class}><td>{}</td><td>{}</td><td>{schedule}</td><td class=\"n\">{} × {}</td><td>{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{:.1}</td><td class=\"n\">{}</td><td class=\"n\">{} to {}</td>\
             <td class=\"n\">{:.1} %</td><td class=\"n\">{:.0}</td></tr>",
            index + 1,
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
    let request = &report.request;
    let accelerator = &request.cluster.accelerator;
    let what = "A plan is only as good as its inputs. Override them in a cluster file.";
    section(page, "Inputs and their sources", what);
    page.push_str("<div class=\"panel scroll\"><table><thead><tr><th>input</th><th class=\"n\">value</th><th>basis</th>");
    page.push_str("<th>source</th></tr></thead><tbody>\n");
    let rows: [(&str, &SourcedValue, f64, &str); 13] = [
        ("peak, 16-bit", &accelerator.peak, 1e12, "TFLOP/s"),
        (
            "maximum matmul rate",
            &accelerator.sustained,
            1e12,
            "TFLOP/s",
        ),
        ("device memory", &accelerator.memory, GIB, "GiB"),
        (
            "memory bandwidth",
            &accelerator.memory_bandwidth,
            1e9,
            "GB/s",
        ),
        (
            "link bandwidth, all peers in the node",
            &accelerator.link,
            1e9,
            "GB/s",
        ),
        (
            "link bandwidth, one peer",
            &accelerator.link_per_peer,
            1e9,
            "GB/s",
        ),
        (
            "network bandwidth per GPU",
            &accelerator.network,
            1e9,
            "GB/s",
        ),
        ("host memory bandwidth", &accelerator.host, 1e9, "GB/s"),
        ("driver context", &request.overheads.context, GIB, "GiB"),
        (
            "NCCL, each communicator",
            &request.overheads.communicator,
            GIB,
            "GiB",
        ),
        (
            "NCCL, each peer of an all-to-all",
            &request.overheads.peer,
            GIB,
            "GiB",
        ),
        (
            "workspaces of matrix products",
            &request.overheads.workspaces,
            GIB,
            "GiB",
        ),
        (
            "allocator fragmentation",
            &request.overheads.fragmentation,
            0.01,
            "%",
        ),
    ];
    for (name, input, unit, suffix) in rows {
        let _ = writeln!(
            page,
            "<tr><td>{name}</td><td class=\"n\">{} {suffix}</td><td><span class=\"basis {basis}\">{basis}</span></td>\
             <td class=\"loose\">{}</td></tr>",
            short(input.value / unit),
            escaped(&input.source),
            basis = input.basis
        );
    }
    page.push_str("</tbody></table>\n");
    let calibration = &request.calibration;
    let _ = writeln!(
        page,
        "<details><summary>Efficiency constants, fitted to {}; mean error on held-out runs {:.0} %</summary><table><tbody>",
        escaped(&calibration.source),
        100.0 * calibration.mean_error
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

/// Formats a number with four digits.
fn short(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e7).contains(&value) {
        return format!("{value:.3e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
