//! `#[derive(Module)]`: the parameters of a struct are those of its fields, in the order in which
//! they are written.
//!
//! A field marked `#[module(skip)]` is left out: a parameter that another module owns, or a type
//! that is no module. A crate that reaches `trainyard-nn` under another path names it with
//! `#[module(crate = path)]` on the struct.

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::{quote, quote_spanned};
use syn::{
    Attribute, Data, DeriveInput, Error, Field, Fields, Path, Result, parse_macro_input,
    parse_quote, spanned::Spanned,
};

/// Implements `Module` for a struct with named fields by visiting each of them.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    implement(&input)
        .unwrap_or_else(Error::into_compile_error)
        .into()
}

fn implement(input: &DeriveInput) -> Result<Tokens> {
    let root = crate_path(&input.attrs)?;
    let visits = visits(input, &root)?;

    let mut generics = input.generics.clone();
    for parameter in generics.type_params_mut() {
        parameter.bounds.push(parse_quote!(#root::Module));
    }
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    let name = &input.ident;
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #root::Module for #name #type_generics #where_clause {
            fn visit(&self, visitor: &mut dyn ::core::ops::FnMut(&#root::Parameter)) {
                let _ = &visitor;
                #(#visits)*
            }
        }
    })
}

fn visits(input: &DeriveInput, root: &Path) -> Result<Vec<Tokens>> {
    let mut visits = Vec::new();
    for field in named_fields(input)? {
        if !is_skipped(field)? {
            let name = &field.ident;
            visits.push(quote_spanned! { field.span() =>
                #root::Module::visit(&self.#name, visitor);
            });
        }
    }
    Ok(visits)
}

fn named_fields(input: &DeriveInput) -> Result<impl Iterator<Item = &Field>> {
    match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => Ok(fields.named.iter()),
            _ => Err(refusal(input)),
        },
        _ => Err(refusal(input)),
    }
}

fn refusal(input: &DeriveInput) -> Error {
    Error::new(
        input.ident.span(),
        "Module can be derived for structs with named fields; implement it by hand here",
    )
}

fn is_skipped(field: &Field) -> Result<bool> {
    let mut skipped = false;
    for attribute in module_attributes(&field.attrs) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("skip") {
                skipped = true;
                Ok(())
            } else {
                Err(meta.error("unknown attribute of a field: did you mean `skip`?"))
            }
        })?;
    }
    Ok(skipped)
}

fn crate_path(attributes: &[Attribute]) -> Result<Path> {
    let mut path = parse_quote!(::trainyard_nn);
    for attribute in module_attributes(attributes) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("crate") {
                path = meta.value()?.call(Path::parse_mod_style)?;
                Ok(())
            } else {
                Err(meta.error("unknown attribute of a struct: did you mean `crate = path`?"))
            }
        })?;
    }
    Ok(path)
}

fn module_attributes(attributes: &[Attribute]) -> impl Iterator<Item = &Attribute> {
    attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("module"))
}
