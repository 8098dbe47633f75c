const wide = document.documentElement.clientWidth, cells = [...document.querySelectorAll("td, th, h1, h2, h3, .keys button")];
return {width: wide, content: document.documentElement.scrollWidth,
  outside: cells.filter((c) => c.offsetParent && c.getBoundingClientRect().right > wide + 1).length,
  charts: [...document.querySelectorAll(".box")].map((b) => b.getBoundingClientRect().width),
  text: Math.min(...[...document.querySelectorAll(".xticks span, .axis")].map((s) => parseFloat(getComputedStyle(s).fontSize)))};
