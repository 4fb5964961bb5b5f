//! Which GPU of a node has which coordinate on every axis, and how the pattern repeats over nodes.

use std::fmt::Write;

use trainyard_plan::{Cluster, Degrees};

/// The largest number of GPUs of a node that is drawn.
const MAX_GPUS: usize = 32;

/// The axes from the innermost: name, stride and size.
fn strides(degrees: &Degrees) -> Vec<(&'static str, usize, usize)> {
    let mut next = 1;
    let axes = degrees.axes().into_iter().filter(|(axis, _)| *axis != "ep");
    let inside_out = axes.rev().map(|(axis, size)| {
        let stride = next;
        next *= size;
        (axis, stride, size)
    });
    inside_out.filter(|(.., size)| *size > 1).collect()
}

pub(super) fn draw(page: &mut String, cluster: &Cluster, degrees: &Degrees) {
    let axes = strides(degrees);
    let gpus_per_node = cluster.gpus_per_node;
    page.push_str("<div class=\"panel\">\n<div class=\"gpus\">\n");
    for gpu in 0..gpus_per_node.min(MAX_GPUS) {
        let inside = axes.iter().filter(|(_, stride, _)| *stride < gpus_per_node);
        let coordinates =
            inside.map(|(axis, stride, size)| format!("{axis} {}", gpu / stride % size));
        // GPUs of one tensor-parallel group have the same color.
        let tone = 1 + gpu / degrees.tp % 7;
        let _ = writeln!(
            page,
            "<div class=\"gpu\" style=\"--tone:var(--c{tone})\"><b>GPU {gpu}</b>{}</div>",
            coordinates.collect::<Vec<_>>().join("<br>")
        );
    }
    page.push_str("</div>\n<ul>\n");
    for (axis, stride, size) in &axes {
        let _ = writeln!(
            page,
            "<li>{}</li>",
            describe_axis(axis, *stride, *size, gpus_per_node)
        );
    }
    if degrees.ep > 1 {
        let within = if degrees.ep <= gpus_per_node {
            "within a node"
        } else {
            "across nodes"
        };
        let _ = writeln!(
            page,
            "<li><b>ep {}</b> spans dp_shard, cp and tp: adjacent ranks, {within}.</li>",
            degrees.ep
        );
    }
    if axes.is_empty() {
        page.push_str("<li>One rank, without parallelism.</li>\n");
    }
    page.push_str("</ul></div>\n");
}

fn describe_axis(axis: &str, stride: usize, size: usize, gpus_per_node: usize) -> String {
    let what = format!("<b>{axis} {size}</b>");
    if stride * size <= gpus_per_node {
        return match stride {
            1 => format!("{what}: {size} adjacent GPUs of one node."),
            _ => format!("{what}: GPUs of one node with stride {stride}."),
        };
    }
    if stride >= gpus_per_node {
        let nodes = stride / gpus_per_node;
        return match nodes {
            1 => format!("{what}: the same GPU of {size} adjacent nodes."),
            _ => format!("{what}: the same GPU of {size} nodes, with a stride of {nodes} nodes."),
        };
    }
    let inside = gpus_per_node / stride;
    format!(
        "{what}: {inside} GPUs per node, across {} adjacent nodes.",
        size.div_ceil(inside)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_described() {
        let degrees = Degrees {
            pp: 16,
            dp_shard: 64,
            cp: 4,
            tp: 4,
            ..Degrees::ONE
        };
        let described: Vec<String> = strides(&degrees)
            .into_iter()
            .map(|(axis, stride, size)| describe_axis(axis, stride, size, 8))
            .collect();
        assert!(
            described[0].contains("4 adjacent GPUs of one node"),
            "{described:?}"
        );
        assert!(
            described[1].contains("2 GPUs per node, across 2"),
            "{described:?}"
        );
        assert!(
            described[2].contains("64 nodes, with a stride of 2"),
            "{described:?}"
        );
        assert!(
            described[3].contains("16 nodes, with a stride of 128"),
            "{described:?}"
        );
    }
}
