//! Floating-point operations of an operator, from the shapes it was given.
//!
//! Only operators that multiply matrices count, and only the innermost of those that call each
//! other: `aten::linear` and `aten::matmul` cost nothing, the `aten::addmm` inside them does. That
//! is the convention behind published utilisation figures. Attention counts whole score matrices,
//! causal or not, as PyTorch's counter does.

/// The floating-point operations of `op` on tensors of `shapes`; a multiply-add counts 2.
///
/// `shapes` are those of the tensor arguments in order, absent ones left out. A convolution's
/// output follows from no input shape: append it if it is known, else the output is taken to be as
/// large as the input (stride 1, padded). Operators that are not known, or whose shapes do not fit,
/// count 0.
pub fn flops(op: &str, shapes: &[Vec<i64>]) -> u64 {
    let name = op.strip_prefix("aten::").unwrap_or(op);
    let name = name.split('.').next().unwrap_or(name);
    let shapes: Vec<&[i64]> = shapes.iter().map(Vec::as_slice).collect();
    let count = match name {
        "mm" | "bmm" | "mv" | "dot" | "_scaled_mm" | "_int_mm" => product_flops(&shapes),
        "addmm" | "addmm_" | "baddbmm" | "baddbmm_" | "addmv" | "addmv_" | "_addmm_activation" => {
            product_flops(shapes.get(1..).unwrap_or_default())
        }
        "_grouped_mm" => grouped_product_flops(&shapes),
        "convolution" | "convolution_overrideable" => convolution_flops(&shapes),
        "convolution_backward" | "convolution_backward_overrideable" => {
            convolution_backward_flops(&shapes)
        }
        "_scaled_dot_product_flash_attention_for_cpu"
        | "_scaled_dot_product_flash_attention"
        | "_scaled_dot_product_efficient_attention"
        | "_scaled_dot_product_cudnn_attention" => attention_flops(&shapes, [1, 1]),
        // The scores again, then the gradients of query, key and the scores; those of the value.
        "_scaled_dot_product_flash_attention_for_cpu_backward"
        | "_scaled_dot_product_flash_attention_backward"
        | "_scaled_dot_product_efficient_attention_backward"
        | "_scaled_dot_product_cudnn_attention_backward" => {
            attention_flops(shapes.get(1..).unwrap_or_default(), [3, 2])
        }
        _ => None,
    };
    count.unwrap_or(0)
}

/// `[.., m, k] x [.., k, n]`, with a vector on either side allowed.
fn product_flops(shapes: &[&[i64]]) -> Option<u64> {
    let [left, right, ..] = shapes else {
        return None;
    };
    let columns = match right {
        [_] => 1,
        [.., columns] => *columns,
        [] => return None,
    };
    multiply(&[2, elements(left)?, u64::try_from(columns).ok()?])
}

/// `[tokens, k] x [experts, k, n]`: every token meets one expert.
fn grouped_product_flops(shapes: &[&[i64]]) -> Option<u64> {
    match shapes {
        [left @ [_, _], right @ [_, _, _], ..] => product_flops(&[left, right]),
        _ => None,
    }
}

/// `input [n, c_in, ..]`, `weight [c_out, c_in / groups, ..]`, perhaps a bias, perhaps the output.
fn convolution_flops(shapes: &[&[i64]]) -> Option<u64> {
    let [input, weight, rest @ ..] = shapes else {
        return None;
    };
    let output = rest
        .iter()
        .find(|shape| shape.len() == input.len())
        .unwrap_or(input);
    one_convolution(output, weight)
}

/// `grad_output`, `input`, `weight`: one convolution for either gradient.
fn convolution_backward_flops(shapes: &[&[i64]]) -> Option<u64> {
    let [grad_output, _, weight, ..] = shapes else {
        return None;
    };
    one_convolution(grad_output, weight)?.checked_mul(2)
}

/// Every element of the output is a product as long as one filter.
fn one_convolution(output: &[i64], weight: &[i64]) -> Option<u64> {
    let (batch, places) = (output.first()?, output.get(2..)?);
    multiply(&[
        2,
        elements(&[*batch])?,
        elements(places)?,
        elements(weight)?,
    ])
}

/// `query [.., s, d]`, `key [.., t, d]`, `value [.., t, e]`: so many products of the scores' size
/// that run over `d`, and so many that run over `e`.
fn attention_flops(shapes: &[&[i64]], [over_d, over_e]: [u64; 2]) -> Option<u64> {
    let [[heads @ .., s, d], [.., t, _], [.., e], ..] = shapes else {
        return None;
    };
    let scores = multiply(&[elements(heads)?, elements(&[*s, *t])?])?;
    let depth = (elements(&[*d])?.checked_mul(over_d)?)
        .checked_add(elements(&[*e])?.checked_mul(over_e)?)?;
    multiply(&[2, scores, depth])
}

fn elements(shape: &[i64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &length| {
        product.checked_mul(u64::try_from(length).ok()?)
    })
}

fn multiply(factors: &[u64]) -> Option<u64> {
    factors
        .iter()
        .try_fold(1u64, |product, &factor| product.checked_mul(factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count<const N: usize>(op: &str, shapes: [&[i64]; N]) -> u64 {
        flops(op, &shapes.map(<[i64]>::to_vec))
    }

    #[test]
    fn products() {
        assert_eq!(count("aten::mm", [&[3, 4], &[4, 5]]), 2 * 3 * 4 * 5);
        assert_eq!(
            count("aten::addmm", [&[5], &[3, 4], &[4, 5]]),
            2 * 3 * 4 * 5
        );
        assert_eq!(
            count("aten::bmm", [&[7, 3, 4], &[7, 4, 5]]),
            2 * 7 * 3 * 4 * 5
        );
        assert_eq!(
            count("aten::baddbmm", [&[7, 3, 5], &[7, 3, 4], &[7, 4, 5]]),
            840
        );
        assert_eq!(count("aten::mv", [&[3, 4], &[4]]), 24);
        assert_eq!(
            count("aten::_grouped_mm", [&[100, 4], &[8, 4, 5], &[8]]),
            2 * 100 * 4 * 5
        );
        assert_eq!(count("mm.out", [&[3, 4], &[4, 5], &[3, 5]]), 120);
    }

    #[test]
    fn a_llama_block_costs_six_operations_per_parameter_and_token() {
        let (tokens, width, hidden) = (4096, 4096, 14336);
        let forward = count("aten::mm", [&[tokens, width], &[width, hidden]]);
        let for_input = count("aten::mm", [&[tokens, hidden], &[hidden, width]]);
        let for_weight = count("aten::mm", [&[hidden, tokens], &[tokens, width]]);
        assert_eq!(
            forward + for_input + for_weight,
            6 * (tokens * width * hidden) as u64
        );
    }

    #[test]
    fn convolutions() {
        let one = 2 * 8 * 32 * 28 * 28 * 9;
        let (input, weight, output): (&[i64], &[i64], &[i64]) =
            (&[8, 1, 28, 28], &[32, 1, 3, 3], &[8, 32, 28, 28]);
        assert_eq!(count("aten::convolution", [input, weight, &[32]]), one);
        assert_eq!(
            count("aten::convolution", [input, weight, &[32], output]),
            one
        );
        assert_eq!(
            count(
                "aten::convolution",
                [input, weight, &[32], &[8, 32, 14, 14]]
            ),
            one / 4
        );
        assert_eq!(
            count("aten::convolution_backward", [output, input, weight]),
            2 * one
        );
        // Depthwise: each of 64 filters sees one channel.
        assert_eq!(
            count("aten::convolution", [&[1, 64, 10], &[64, 1, 5]]),
            2 * 10 * 64 * 5
        );
    }

    #[test]
    fn attention() {
        let forward = "aten::_scaled_dot_product_flash_attention_for_cpu";
        let backward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
        let (query, key): (&[i64], &[i64]) = (&[2, 32, 128, 64], &[2, 8, 256, 64]);
        let product = 2 * 2 * 32 * 128 * 256 * 64;
        assert_eq!(count(forward, [query, key, key]), 2 * product);
        assert_eq!(
            count(backward, [query, query, key, key, query, &[2, 128, 32]]),
            5 * product
        );
    }

    #[test]
    fn what_is_unknown_or_does_not_fit_counts_nothing() {
        assert_eq!(count("aten::linear", [&[3, 4], &[5, 4]]), 0);
        assert_eq!(count("aten::add", [&[3, 4], &[3, 4]]), 0);
        assert_eq!(count("aten::mm", [&[3, 4]]), 0);
        assert_eq!(count("aten::mm", [&[], &[]]), 0);
        assert_eq!(count("aten::addmm", []), 0);
        assert_eq!(count("aten::convolution", [&[1], &[1]]), 0);
        assert_eq!(count("aten::mm", [&[-1, 4], &[4, 5]]), 0);
        assert_eq!(
            count("aten::mm", [&[i64::MAX, i64::MAX], &[i64::MAX, 2]]),
            0
        );
    }
}
