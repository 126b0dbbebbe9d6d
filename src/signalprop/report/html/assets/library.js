"use strict";

/** The plotting library from its compressed form in the page. */
async function loadLibrary() {
  const packed = document.getElementById("library");
  const stream = new Blob([bytesOf(packed.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  packed.remove();
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  performance.mark("inflated");
  document.head.append(script);
  if (!window.Plotly) throw new Error("the plotting library did not start");
}
